"""Pruning during training: a polynomial schedule, and masks that hold in the float32 masters too."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("float16")
digits = hs.loops.tasks.load("digits")


class Mask(keras.constraints.Constraint):
    """Keeps at zero what was pruned. Keras calls a constraint after the optimizer has moved its variable."""

    def __init__(self, shape):
        self.kept = tf.Variable(tf.ones(shape), trainable=False)

    def __call__(self, weights):
        return weights * tf.cast(self.kept, weights.dtype)


layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64, activation="relu")]
inputs = [keras.Input([8, 8, 1]), keras.layers.Flatten()]
model = keras.Sequential([*inputs, *layers, keras.layers.Dense(10, dtype="float32")])
for layer in layers:
    layer.kernel.constraint = Mask(layer.kernel.shape)  # before the masters are made, which take it over
step = hs.TrainStep(model, digits.loss, keras.optimizers.Adam(1e-3))


def prune(visit):
    share = 0.8 * (1.0 - (1.0 - min(visit.counters.applied / 400, 1.0)) ** 3)  # Zhu and Gupta 2017
    for master in (step.masters.weights[0], step.masters.weights[2]):
        magnitudes = np.abs(master.numpy())
        master.constraint.kept.assign(magnitudes > np.quantile(magnitudes, share))
    print(f"step {visit.counters.data}: {share:.0%} are to be zero, accuracy {digits.accuracy(model):.1%}")


hs.Loop(step, digits.dataset(64, seed=0), steps_per_call=100, actions=[prune]).run(500)
model.save("pruned.keras")
loaded = keras.saving.load_model("pruned.keras")
for name, weights in {"model": model.weights, "masters": step.masters.weights, "file": loaded.weights}.items():
    print(f"zeros in the {name}:", ", ".join(f"{np.mean(weights[i].numpy() == 0.0):.1%}" for i in (0, 2)))
