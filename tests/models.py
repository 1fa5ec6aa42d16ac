"""Small models that many tests train, their batches and their loss.

A model has the same weights every time, and its layers the same names, by which a skip is kept.
"""

import keras
import numpy as np
import tensorflow as tf


def plain_model(kind="float32", ends=(), **arguments):
    """Two dense layers on four numbers, with no state beside the weights; `ends` are further layers."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input([4], dtype=keras.DTypePolicy(kind).compute_dtype),
            keras.layers.Dense(6, activation="tanh", dtype=kind, name="dense", **arguments),
            keras.layers.Dense(1, dtype=kind, name="dense_1", **arguments),
            *ends,
        ],
        name="sequential",
    )


def one_layer(kind="float32"):
    """One dense layer on four numbers: what is traced soonest."""
    keras.utils.set_random_seed(7)
    dense = keras.layers.Dense(1, dtype=kind, name="dense")
    return keras.Sequential([keras.Input([4], dtype=keras.DTypePolicy(kind).compute_dtype), dense], name="sequential")


def stateful_model(kind="float32", dropout=0.25, ends=()):
    """The same with BatchNorm and dropout: moving statistics and a seed generator. Few weights are traced soon."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input([4], dtype=keras.DTypePolicy(kind).compute_dtype),
            keras.layers.Dense(6, activation="relu", use_bias=False, dtype=kind, name="dense"),
            keras.layers.BatchNormalization(
                momentum=0.5, center=False, scale=False, dtype=kind, name="batch_normalization"
            ),
            keras.layers.Dropout(dropout, seed=3, dtype=kind, name="dropout"),
            keras.layers.Dense(1, dtype=kind, name="dense_1"),
            *ends,
        ],
        name="sequential",
    )


def normalized(kind="float32", dropout=0.25):
    """BatchNorm, dropout and one dense layer: what is traced soonest with a state."""
    keras.utils.set_random_seed(7)
    layers = [
        # With an offset, so that every activation has a gradient.
        keras.layers.BatchNormalization(momentum=0.5, scale=False, dtype=kind, name="batch_normalization"),
        keras.layers.Dropout(dropout, seed=3, dtype=kind, name="dropout"),
        keras.layers.Dense(1, dtype=kind, name="dense"),
    ]
    return keras.Sequential([keras.Input([4], dtype=keras.DTypePolicy(kind).compute_dtype), *layers], name="sequential")


def two_layers(kind="float32", frozen=()):
    """Two dense layers of one shape, `dense_0` and `dense_1`; those numbered in `frozen` are not trained."""
    keras.utils.set_random_seed(3)
    dense = [keras.layers.Dense(4, dtype=kind, name=f"dense_{place}") for place in range(2)]
    for place in frozen:
        dense[place].trainable = False
    return keras.Sequential([keras.Input([4]), *dense])


def kernels(model):
    """The bytes of each layer's kernel."""
    return [layer.kernel.numpy().tobytes() for layer in model.layers]


def squared_error(y, prediction):
    """Mean squared error in float32."""
    return tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y))


def batch(seed=0, size=8):
    """Inputs of shape [size, 4] and targets of shape [size, 1], float32."""
    random = np.random.default_rng(seed)
    return random.normal(size=(size, 4)).astype(np.float32), random.normal(size=(size, 1)).astype(np.float32)
