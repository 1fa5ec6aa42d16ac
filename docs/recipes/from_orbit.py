"""An Orbit trainer, ported: `StandardTrainer` and `Controller` become a step, a loop and actions."""

import keras
import tensorflow as tf

import halfstep as hs

digits = hs.loops.tasks.load("digits")
held_out = tf.data.Dataset.from_tensor_slices((digits.test_images, digits.test_labels)).batch(64)


class Trainer:  # orbit.StandardTrainer, orbit.StandardEvaluator
    def __init__(self):
        keras.utils.set_random_seed(0)
        self.model = digits.model("mixed_float16")
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.loss_scaler = hs.LossScaler(hs.Dynamic())  # tf.keras.mixed_precision.LossScaleOptimizer(...)

    def train_step(self, x, y):  # train_step(self, iterator): x, y = next(iterator)
        before = hs.snapshot(self.model.non_trainable_variables)
        with tf.GradientTape() as tape:
            loss = digits.loss(y, self.model(x, training=True))
            scaled = self.loss_scaler.scale(loss)  # optimizer.get_scaled_loss(loss)
        weights = self.model.trainable_variables
        outcome = self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, weights), weights, rollback=before)
        # self.train_loss.update_state(loss), and train_loop_end: what is returned is averaged where it is shown
        return {"loss": loss, "applied": outcome.finite}


trainer = Trainer()
accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
evaluate = hs.Evaluate(trainer.model, held_out, [accuracy], every=50)  # eval_interval=50
actions = [
    evaluate,
    hs.JsonLines("run/steps.jsonl", every=10),  # summary_interval=10, summary_dir="run"; or hs.TensorBoard
    hs.Checkpoint("run/checkpoints", every=50, resume=True),  # checkpoint_manager=..., restore_checkpoint
]
# orbit.Controller(trainer=trainer, steps_per_loop=25, ...).train_and_evaluate(train_steps=100, ...)
print(hs.Loop(trainer.train_step, digits.dataset(64, seed=0), steps_per_call=25, actions=actions).run(100))
print(f"accuracy {evaluate.results['accuracy']:.2f}, scale {trainer.loss_scaler.loss_scale:.0f}")
