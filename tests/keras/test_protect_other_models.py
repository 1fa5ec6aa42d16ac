"""Under `protect` a skip also puts back state of layers that belong to no part of the model: those its step calls."""

import gc
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import scaler
from scaler.backend import layers

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
BAD = np.where(np.arange(32).reshape(8, 4) == 0, np.float32("nan"), X)


class Head(keras.Model):
    """A model whose loss calls encoders that it does not hold."""

    def __init__(self, *encode):
        super().__init__()
        self.head = keras.layers.Dense(1)
        object.__setattr__(self, "encode", encode)

    def call(self, x):
        return self.head(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred - sum(encode(x)[:, :1] for encode in self.encode)))


def encoder():
    """A model with state, and a function that calls it."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(center=False, scale=False)])
    return model, lambda x: model(x, training=True)


@pytest.mark.dear("the step of `fit`, and for a batch that is skipped, with models of its own")
@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("way", ["graph", "xla"])
def test_models_that_the_step_calls_are_put_back(way, monkeypatch):
    """One is called as it is, one in a function that was traced before."""
    monkeypatch.setattr(layers, "alive", inspect.unwrap(layers.alive))
    gc.freeze()  # Only what this test makes is searched: `test_living_objects.py` searches among all.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    (plain, call), (other, function) = encoder(), encoder()
    traced = tf.function(function)
    traced(tf.constant(X))
    model = Head(call, traced)
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.01)), jit_compile=way == "xla")
    scaler.protect(model)
    states = []
    for x in (X, BAD, X):
        model.train_on_batch(x, np.zeros((8, 1), "float32"))
        states.append([raw(one.non_trainable_variables) for one in (plain, other)])
    assert states[0] == states[1]
    assert all(one != then for one, then in zip(states[2], states[1], strict=True))
