"""Models, set-ups and samples for lint, and what hurts in its findings."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

HALF = "mixed_float16"
L = keras.layers
MSE = keras.losses.MeanSquaredError()


def scaled():
    return scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def named(findings, layer):
    """What hurts in a layer, without the notes."""
    return [one for one in findings if one.layer == layer and not one.is_note]


def heavy(findings):
    return [one for one in findings if not one.is_note]


def function(name, body):
    return L.Lambda(body, dtype=HALF, name=name)


def small(policy=HALF, last="float32", activation=None):
    return keras.Sequential(
        [
            keras.Input([8]),
            L.Dense(8, activation="relu", dtype=policy, name="first"),
            L.Dense(8, activation=activation, dtype=last, name="last"),
        ],
        name="small",
    )


def batch():
    random = np.random.default_rng(0)
    return random.normal(size=[16, 8]).astype(np.float32), random.uniform(size=[16, 8]).astype(np.float32)


def dataset():
    return tf.data.Dataset.from_tensor_slices(batch()).batch(4)


def train_step(model, strategy=None, **arguments):
    strategy = scaler.Dynamic() if strategy is None else strategy
    return loops.TrainStep(model, MSE, keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler(strategy), **arguments)


def functional(body):
    inputs = keras.Input([8])
    # Of one sign: an infinity is not made NaN on its way.
    eighth = keras.initializers.Constant(1 / 8)
    hidden = L.Dense(8, dtype=HALF, kernel_initializer=eighth, name="hidden")(inputs)
    return keras.Model(inputs, L.Dense(8, dtype="float32", kernel_initializer=eighth, name="head")(body(hidden)))
