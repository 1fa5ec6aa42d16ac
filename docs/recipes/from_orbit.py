"""An Orbit trainer, ported: `StandardTrainer` and `Controller` become a step, a loop and actions."""

import keras
import tensorflow as tf

import loops
import scaler
from loops import tasks

keras.utils.set_random_seed(0)
digits = tasks.load("digits")


class Trainer(tf.Module):  # orbit.StandardTrainer, orbit.StandardEvaluator
    def __init__(self):
        super().__init__()
        keras.config.set_dtype_policy("mixed_float16")
        hidden = [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
        self.model = keras.Sequential([keras.Input([8, 8, 1]), *hidden, keras.layers.Dense(10, dtype="float32")])
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic())  # tf.keras.mixed_precision.LossScaleOptimizer(...)

    def train_step(self, batch):  # train_step(self, iterator): x, y = next(iterator)
        x, y = batch
        before = scaler.snapshot(self.model.non_trainable_variables)
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = self.loss_fn(y, logits)
            scaled = self.loss_scaler.scale(loss)  # optimizer.get_scaled_loss(loss)
        weights = self.model.trainable_variables
        outcome = self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, weights), weights, rollback=before)
        right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1, tf.int32), y), tf.float32))
        # self.train_loss.update_state(loss), and train_loop_end: what is returned is averaged where it is shown
        return {"loss": loss, "train_accuracy": right, "applied": outcome.finite}


trainer = Trainer()
held_out = tf.data.Dataset.from_tensor_slices((digits.test_images, digits.test_labels)).batch(64)
accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
evaluate = loops.Evaluate(trainer.model, held_out, [accuracy], every=100)  # eval_interval=100
controller = loops.Loop(  # orbit.Controller(trainer=trainer, evaluator=trainer, ...)
    trainer.train_step,
    digits.dataset(64, seed=0),
    steps_per_call=50,  # steps_per_loop=50
    actions=[
        evaluate,
        loops.JsonLines("run/steps.jsonl", every=10),  # summary_interval=10, summary_dir="run"; or loops.TensorBoard
        loops.Checkpoint("run/checkpoints", every=100, resume=True),  # checkpoint_manager=..., restore_checkpoint
    ],
)
counters = controller.run(200)  # controller.train_and_evaluate(train_steps=200, ...)
print(counters)
print(f"accuracy {evaluate.results['accuracy']:.2f}, scale {trainer.loss_scaler.loss_scale:.0f}")
