"""Under `protect` a skip also puts back state of layers that belong to no part of the model: those its step calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
BAD = np.where(np.arange(32).reshape(8, 4) == 0, np.float32("nan"), X)


class Head(keras.Model):
    """A model whose loss calls an encoder that it does not hold."""

    def __init__(self, encode):
        super().__init__()
        self.head = keras.layers.Dense(1)
        object.__setattr__(self, "encode", encode)

    def call(self, x):
        return self.head(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(self.encode(x), -1, keepdims=True)))


@pytest.mark.dear("the step of `fit`, and for a batch that is skipped, with a model of its own")
@pytest.mark.slow_with("xla-new", "xla-traced before", "graph-traced before", "eager-traced before")
@pytest.mark.parametrize("traced", [False, True], ids=["new", "traced before"])
@pytest.mark.parametrize("way", ["graph", "eager", "xla"])
def test_a_model_that_the_step_calls_is_put_back(way, traced):
    encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    encode = tf.function(lambda x: encoder(x, training=True))
    if traced:
        encode(tf.constant(X))
    model = Head(encode if traced else encode.python_function)
    model.compile(
        scaler.LossScaleOptimizer(keras.optimizers.SGD(0.01)), run_eagerly=way == "eager", jit_compile=way == "xla"
    )
    scaler.protect(model)
    states = []
    for x in (X, BAD, X):
        model.train_on_batch(x, np.zeros((8, 1), "float32"))
        states.append([variable.numpy() for variable in encoder.non_trainable_variables])
    assert all(map(np.array_equal, states[0], states[1]))
    assert not all(map(np.array_equal, states[1], states[2]))
