"""Fault 6: finite gradients of a loss that is not finite, and some so large that the optimizer would make infinities.

Guards line 1 of the promise: a step is applied only if every unscaled gradient and their squared norm are finite.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, run_in, spoil_gradient
from models import one_layer, squared_error
from rigs import assert_finite, raw
from ways import selects

import scaler
from scaler import Cause

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.slow_with("xla-Adam")
@pytest.mark.parametrize(("mode", "name"), [("eager", "AdamW"), ("loop", "momentum"), ("xla", "Adam")])
def test_gradients_of_1e20_never_reach_the_optimizer_and_sound_ones_of_any_loss_do(name, mode):
    """A float32 layer whose gradients are multiplied by a factor; scale 2^-20 keeps the scaled ones in range."""
    model, optimizer = one_layer(), OPTIMIZERS[name]()
    weights = model.trainable_variables
    optimizer.build(weights)
    variables = [*weights, *optimizer.variables]
    loss_scaler, constant = scaler.LossScaler(scaler.Static(2.0**-20)), tf.Variable(0.0)

    def step(x, y, factor):
        with tf.GradientTape() as tape:
            loss = squared_error(y, spoil_gradient(model(x), factor)) + constant
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights)
        return {"loss": loss, "applied": outcome.finite, "cause": outcome.cause}

    run = run_in(mode, step)
    assert run(batches(1))[0]["applied"]
    before = raw(variables)
    outputs = run([batch(2, factor=factor) for factor in (1e21, 1e25, -1e30, 1e37)])
    assert all(np.isfinite(output["loss"]) for output in outputs)
    assert not any(output["applied"] for output in outputs)
    assert {output["cause"] for output in outputs} == {Cause.OVERFLOW if selects(mode) else Cause.TOO_LARGE}
    assert raw(variables) == before
    # Just below: their squares still fit, so the optimizer may have them, and stays finite.
    assert all(output["applied"] for output in run([*batches(3), batch(4, factor=1e14), *batches(5, 6)]))
    # A loss that is not finite by a constant alone has sound gradients, and gradients decide.
    constant.assign(np.inf)
    (output,) = run(batches(7))
    assert not np.isfinite(output["loss"])
    assert output["applied"]
    assert_finite(variables)
