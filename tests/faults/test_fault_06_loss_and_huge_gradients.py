"""Fault 6: a loss that is already non-finite, and finite gradients so large that the optimizer would make infinities.

Guards line 1 of the promise: a step is applied only if every unscaled gradient and their squared norm are finite.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, run_in, spoil_gradient
from rigs import assert_finite, raw
from ways import selects

import scaler
from scaler import Cause

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.slow_with("by hand-xla", "by hand-eager")
@pytest.mark.exhaustive_with("by hand-xla", "by hand-graph", "composed-loop")
def test_a_loss_that_is_not_finite_is_skipped(rig):
    rig.reset(low=2.0**10, high=2.0**10).run(batches(1, 2))
    before = rig.bits()
    for bad in (np.inf, -np.inf, np.nan, 1e30):
        (output,) = rig.run([batch(5, y=bad)])
        assert not np.isfinite(output["loss"])
        assert not output["applied"]
        assert rig.bits() == before
        assert Cause(int(rig.loss_scaler.last_skip.cause)) is Cause.LOSS
    assert rig.run(batches(3))[0]["applied"]
    rig.assert_finite()


@pytest.mark.exhaustive_with("loop")
@pytest.mark.slow_with("xla")
def test_a_loss_that_is_not_finite_by_a_constant_alone_harms_nothing(mode):
    # Its gradients are sound, and gradients decide.
    weight, optimizer = tf.Variable([1.0]), keras.optimizers.Adam(0.1)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(scaler.Dynamic())

    def step(constant):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.square(weight)) + constant)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, [weight]), [weight])
        return {"applied": outcome.finite, "cause": outcome.cause}

    run = run_in(mode, step)
    outputs = run([(np.float32(np.inf),), (np.float32(0),)])
    assert [bool(output["applied"]) for output in outputs] == [True, True]
    assert_finite([weight, *optimizer.variables])


@functools.cache
def huge(name, mode):
    """A float32 layer whose gradients are multiplied by a factor; scale 2^-20 keeps the scaled ones in range."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
    weights, optimizer = model.trainable_variables, OPTIMIZERS[name]()
    optimizer.build(weights)
    loss_scaler = scaler.LossScaler(scaler.Static(2.0**-20))

    def step(x, y, factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(spoil_gradient(model(x), factor) - y))
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights)
        return {"loss": loss, "applied": outcome.finite, "cause": outcome.cause}

    return run_in(mode, step), [*weights, *optimizer.variables]


@pytest.mark.slow_with("loop-AdamW")
@pytest.mark.exhaustive_with("xla-Adam")
@pytest.mark.parametrize(
    ("mode", "name"), [("graph", "Adam"), ("eager", "AdamW"), ("loop", "AdamW"), ("eager", "momentum"), ("xla", "Adam")]
)
def test_gradients_of_1e20_never_reach_the_optimizer(name, mode):
    run, variables = huge(name, mode)
    assert run(batches(1))[0]["applied"]
    before = raw(variables)
    for factor in (1e21, 1e25, -1e30, 1e37):
        outputs = run([batch(2, factor=factor)] * 2)
        assert all(np.isfinite(output["loss"]) for output in outputs)
        assert not any(output["applied"] for output in outputs)
        assert {output["cause"] for output in outputs} == {Cause.OVERFLOW if selects(mode) else Cause.TOO_LARGE}
    assert raw(variables) == before
    assert run(batches(3))[0]["applied"]
    # Just below: their squares still fit, so the optimizer may have them, and stays finite.
    below = run([batch(4, factor=1e14)])
    assert below[0]["applied"]
    run(batches(5, 6))
    assert_finite(variables)
