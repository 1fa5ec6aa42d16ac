"""What the tests of applied and skipped steps share: modes, optimizers and their slots."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler
from scaler.gate import propose


def modes(*names):
    """A test in some of the modes only: every mode is one mechanism, and others run this one's subject in the rest."""
    return pytest.mark.parametrize("execute", names, indirect=True)


def modes_with(names, **cases):
    """A test with parameters of these names, in each mode with those cases only."""
    rows = [(mode, *case) for mode, given in cases.items() for case in given]
    return pytest.mark.parametrize(("execute", *names), rows, indirect=["execute"])


def by_hand(strategy, **arguments):
    """A loss scaler for gradients that a test scales by hand: somebody has read its scale."""
    loss_scaler = scaler.LossScaler(strategy, **arguments)
    assert loss_scaler.loss_scale > 0.0
    return loss_scaler


@tf.autograph.experimental.do_not_convert
def gradients_of(loss_scaler, loss, variables):
    """The gradients of a loss that this scaler scales: `loss` is a function without arguments."""
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(loss())
    return tape.gradient(scaled, variables)


def said(call, kind=scaler.InvalidArgument):
    """What a call says that is refused, without the addresses of what it was given."""
    with pytest.raises(kind) as refused:
        call()
    return re.sub(" at 0x[0-9a-f]+", "", str(refused.value))


def plain_descent(grads, variables):
    """The simplest optimizer: a function."""
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(tf.convert_to_tensor(grad))


def descent(*variables):
    """The same as an optimizer of Keras's: a step can select what it moves, which is traced in half the time."""
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    return optimizer


def take(loss_scaler, optimizer, loss, weights, **arguments):
    """A step by hand: the loss that a function returns is scaled, differentiated and applied. Its outcome."""
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(loss())
    return loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights, **arguments)


@tf.custom_gradient
def steep(value, slope):
    """`value`, whose gradient is multiplied by `slope`: it overflows while the loss is finite."""
    return tf.identity(value), lambda upstream: (upstream * slope, tf.zeros_like(slope))


OPTIMIZERS = {
    "plain": lambda: plain_descent,
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, use_ema=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}


def slots(optimizer):
    """Everything an optimizer keeps: iterations, learning rate, momenta, averages."""
    return getattr(optimizer, "variables", [])


def compile_updates(monkeypatch, handles):
    """Has updates compiled from so many handles on, though the variables of a test are small; what counts them."""
    monkeypatch.setattr(propose, "_WORTH_COMPILING", max(int(handles * propose._HANDLE), 1))
    return laid_out(monkeypatch)


def laid_out(monkeypatch):
    """Grows with each update that is laid out in another way than the optimizer's own."""
    made, move = [], propose._Groups.move
    monkeypatch.setattr(propose._Groups, "move", lambda *arguments: made.append(1) or move(*arguments))
    return made


def lay_out_nothing(monkeypatch):
    """Has each optimizer move its variables by itself."""
    monkeypatch.setattr(propose, "_layout", lambda *arguments: None)


BAD = 2
"""The step whose `random_gradients` have an infinity."""


def random_gradients(step, dtype, variables, scale=8.0):
    """Gradients of a step, the same each time."""
    rng = np.random.default_rng(step + 1)
    values = [rng.normal(size=variable.shape).astype(np.float32) * scale for variable in variables]
    if step == BAD:
        values[1].flat[0] = np.inf
    return [tf.constant(value, dtype) for value in values]
