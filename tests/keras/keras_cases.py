"""What the tests of the Keras drop-in share: a model with all kinds of state, data, batches that overflow, bytes."""

import functools

import keras
import models
import numpy as np
from rigs import raw

import scaler

SCALE = 2.0**8
"""Ordinary gradients are finite at this scale, also in float16."""


def data(size=48, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(size, 4)).astype(np.float32)
    return x, (x[:, :1] * 0.5).astype(np.float32)


def overflowing(size=8):
    """A batch whose forward pass overflows float16, and with it BatchNorm's statistics."""
    x, y = data(size, seed=1)
    x[3] = 1e30
    return x, y


def make_model(policy="mixed_float16", stateful=True, dropout=0.25):
    ends = [keras.layers.Activation("linear", dtype="float32")]
    return models.stateful_model(policy, dropout, ends=ends) if stateful else models.one_layer(policy)


def compiled(
    policy="mixed_float16", inner=None, strategy=None, *, stateful=True, dropout=0.25, protect=True, **arguments
):
    """A model that is compiled with ours; by XLA, which takes seconds, only where a test asks for it."""
    arguments = {"jit_compile": False, "metrics": ["mae"] if stateful else None, **arguments}
    model = make_model(policy, stateful, dropout)
    strategy = strategy or scaler.Dynamic(SCALE)
    optimizer = scaler.LossScaleOptimizer(inner or keras.optimizers.SGD(1e-2, momentum=0.9), strategy)
    model.compile(optimizer, loss="mse", **arguments)
    return scaler.protect(model) if protect else model


def returner(model):
    """A function that sets the model, its optimizer and its metrics back to where they are now."""
    model.optimizer.build(model.trainable_variables)
    start = [(variable, np.asarray(variable)) for variable in (*model.variables, *model.optimizer.variables)]

    def set_back():
        for variable, value in start:
            variable.assign(value)
        model.reset_metrics()

    return set_back


@functools.cache
def _kept(make, arguments):
    model = make(**dict(arguments))
    return model, returner(model)


def started(make=compiled, **arguments):
    """A model that is made and traced once for all tests of a process, as it was when it was made."""
    model, set_back = _kept(make, tuple(arguments.items()))
    set_back()
    return model


def fit(model, epochs=1, **arguments):
    x, y = data()
    return model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **arguments).history


def everything(model):
    """The bytes of all that training moves, the scaler's own state included."""
    return raw([*model.variables, *model.optimizer.variables])


def finite(model):
    arrays = [np.asarray(variable) for variable in (*model.variables, *model.optimizer.variables)]
    return all(np.isfinite(array.astype(np.float64)).all() for array in arrays if array.dtype.kind == "f")
