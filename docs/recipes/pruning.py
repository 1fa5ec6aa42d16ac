"""Pruning during training: a polynomial schedule, and masks that hold in the float32 masters too."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler
from loops import tasks

PRUNED_BY, SPARSITY = 400, 0.8
keras.utils.set_random_seed(0)
digits = tasks.load("digits")
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Mask(keras.constraints.Constraint):
    """Keeps at zero what was pruned. Keras calls a constraint after the optimizer has moved its variable."""

    def __init__(self, shape):
        self.kept = tf.Variable(tf.ones(shape), trainable=False)

    def __call__(self, weights):
        return weights * tf.cast(self.kept, weights.dtype)


keras.config.set_dtype_policy("float16")
layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64, activation="relu")]
inputs = [keras.Input([8, 8, 1]), keras.layers.Flatten()]
model = keras.Sequential([*inputs, *layers, keras.layers.Dense(10, dtype="float32")])
for layer in layers:
    layer.kernel.constraint = Mask(layer.kernel.shape)  # before the masters are made, which take it over
step = loops.TrainStep(model, cross_entropy, keras.optimizers.Adam(1e-3), loss_scaler=scaler.LossScaler())


def prune(visit):
    done = min(visit.counters.applied / PRUNED_BY, 1.0)
    share = SPARSITY * (1.0 - (1.0 - done) ** 3)  # Zhu and Gupta 2017
    for master in (step.masters.weights[0], step.masters.weights[2]):
        magnitudes = np.abs(master.numpy())
        master.constraint.kept.assign(magnitudes > np.quantile(magnitudes, share))
    accuracy = digits.accuracy(model)
    print(f"step {visit.counters.data}: {share:.0%} are to be zero, accuracy {accuracy:.1%}")


def zeros(kernels):
    return ", ".join(f"{np.mean(kernel.numpy() == 0.0):.1%}" for kernel in kernels)


loops.Loop(step, digits.dataset(64, seed=0), steps_per_call=100, actions=[prune]).run(500)
model.save("pruned.keras")
loaded = keras.saving.load_model("pruned.keras")
print("zeros in the model  ", zeros(layer.kernel for layer in layers))
print("zeros in the masters", zeros((step.masters.weights[0], step.masters.weights[2])))
print("zeros in the file   ", zeros((loaded.trainable_variables[0], loaded.trainable_variables[2])))
