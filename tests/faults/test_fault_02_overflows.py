"""Faults 2 and 3: hundreds of overflows, of bad data or of growths in a row, then good steps. Nothing is corrupted,
training goes on. Overflows end at the floor of the scale, growths at its ceiling, and bad data leaves it where it is.

Guards lines 1, 2, 3 and 6 of the promise: never corrupts, never leaves its range, never half-skips, never sticks.
"""

import fault_cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, of_rigs, run_in

import scaler

INFINITE = np.nan, np.inf, -np.inf


@pytest.mark.slow_with("by hand-xla")
@of_rigs(0, 2, 3)
def test_the_scale_rests_at_its_floor_and_training_goes_on(rig):
    for low, steps in ((2.0**-14, 40), (2.0**-126, 300)):
        # Steps one by one are slow, so they begin just above the floor.
        initial, steps = (2.0**10, steps) if rig.mode == "loop" else (low * 4, 3)
        rig.reset(low=low, initial=initial, interval=1)
        before = rig.bits()
        outputs = rig.run([batch(number % 20, factor=INFINITE[number % 3]) for number in range(steps)])
        assert not any(output["applied"] for output in outputs)
        assert rig.bits() == before
        assert rig.scale() == low
        assert min(output["loss_scale"] for output in outputs) >= low
        # At a scale far below 1 float16 flushes every gradient to zero: applied, but only growth brings them back.
        clean = rig.run(batches(1, 2))
        assert all(output["applied"] for output in clean)
        assert [output["loss_scale"] for output in clean] == [low, low * 2]
        assert int(rig.loss_scaler.counters.consecutive_skips) == 0
        assert int(rig.loss_scaler.counters.skipped) == steps
        rig.assert_finite()
        assert rig.bits() != before


@pytest.fixture
def looping():
    """The rig of which hundreds of steps are one call."""
    return fault_cases.rig("composed", "loop").reset()


def test_bad_data_leaves_the_scale_where_it_is(looping):
    rig = looping.reset(low=2.0**8, initial=2.0**10, interval=2)
    before = rig.bits()
    bad = [batch(number, y=INFINITE[number % 3]) for number in range(300)]
    outputs = rig.run([*bad, batch(0, factor=np.inf), *bad])
    assert not any(output["applied"] for output in outputs)
    assert rig.bits() == before
    assert [output["loss_scale"] for output in outputs] == [2.0**10] * 301 + [2.0**9] * 300
    clean = rig.run(batches(*range(3)))
    assert all(output["applied"] for output in clean)
    assert [output["loss_scale"] for output in clean] == [2.0**9, 2.0**9, 2.0**10]
    rig.assert_finite()


@pytest.mark.slow
def test_gradients_come_back_from_a_deep_floor(looping):
    rig, depth = looping, 126
    rig.reset(low=2.0**-depth, initial=2.0**-depth, interval=1)
    start = rig.masters.weights[0].numpy()
    outputs = rig.run(batches(*range(depth + 20)))
    assert all(output["applied"] for output in outputs[:depth])
    assert np.abs(rig.masters.weights[0].numpy() - start).max() > 0.01
    assert outputs[-1]["loss_scale"] > 2.0
    rig.assert_finite()


@pytest.mark.parametrize("high", [2.0**40, 2.0**126])
def test_the_scale_rests_at_its_ceiling_and_comes_back(looping, high):
    """Gradients of zero up to the ceiling, then normal ones."""
    rig = looping.reset(high=high, interval=1)
    weights = [weight.numpy() for weight in rig.masters.weights]
    outputs = rig.run([batch(number % 10, factor=0.0) for number in range(120 if high == 2.0**40 else 300)])
    assert all(output["applied"] for output in outputs)
    assert max(output["loss_scale"] for output in outputs) <= high
    assert rig.scale() == high
    for weight, value in zip(rig.masters.weights, weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    before = rig.bits()
    back = []
    while not any(output["applied"] for output in back):
        assert rig.bits() == before
        back += rig.run([batch(5)] * 16)
        assert len(back) < 150
    skipped = [bool(output["applied"]) for output in back].index(True)
    assert skipped > 0
    assert [output["loss_scale"] for output in back[: skipped + 1]] == [high / 2**n for n in range(skipped + 1)]
    rig.run(batches(*range(3)))
    assert np.isfinite(rig.infer()).all()
    assert any((w.numpy() != value).any() for w, value in zip(rig.masters.weights, weights, strict=True))
    rig.assert_finite()


def test_growth_at_the_ceiling_does_not_wear_the_state_out(looping):
    rig = looping.reset(high=2.0**12, interval=2)
    rig.run([batch(number % 4, factor=0.0) for number in range(40)])
    assert rig.scale() == 2.0**12
    assert int(rig.loss_scaler.state.good_steps) == 0
    assert not rig.run([batch(0, factor=np.inf)])[0]["applied"]
    assert rig.scale() == 2.0**11


def test_a_model_that_needs_a_scale_below_1_trains_and_cannot_at_1():
    """A float16 section whose true gradients begin at about 2^19."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(1, use_bias=False, dtype="float16")
    model = keras.Sequential([keras.Input([4], dtype="float16"), dense])
    masters, optimizer = scaler.MasterWeights(model.trainable_variables), keras.optimizers.Adam(0.05)
    optimizer.build(masters.weights)
    low, high = tf.Variable(1.0), tf.Variable(1.0)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(1.0, min_scale=low, max_scale=high))
    true = tf.constant([[1.0], [-2.0], [0.5], [1.5]])

    def step(x, y, factor):
        del y, factor
        with tf.GradientTape() as tape:
            hidden = tf.cast(model(x * 2.0**-8), tf.float32)
            loss = tf.reduce_mean(tf.square(hidden * 2.0**14 - x @ true * 2.0**6))
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), masters)
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    run = run_in("loop", step)
    assert not any(output["applied"] for output in run(batches(*range(20))))
    low.assign(2.0**-14)
    high.assign(2.0**40)
    outputs = run(batches(*range(20)) * 6)
    assert sum(output["applied"] for output in outputs) > 60
    assert all(output["loss_scale"] < 1 for output in outputs if output["applied"])
    assert outputs[-1]["loss"] < 0.01 * outputs[0]["loss"]
