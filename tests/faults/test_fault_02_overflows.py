"""Fault 2: 300 non-finite steps in a row, nothing is corrupted, training goes on. Overflows end at the floor of the
scale, and bad data leaves it where it is.

Guards lines 1, 2, 3 and 6 of the promise: never corrupts, never leaves its range, never half-skips, never sticks.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, run_in

import scaler


@pytest.mark.slow_with("by hand-xla", "composed-eager")
@pytest.mark.exhaustive_with("by hand-graph")
def test_the_scale_rests_at_its_floor_and_training_goes_on(rig):
    for low, repeated in ((2.0**-14, 2), (2.0**-40, 3), (2.0**-126, 15)):
        # Steps one by one are slow, so they begin just above the floor.
        few = rig.mode != "loop"
        rig.reset(low=low, initial=low * 4 if few else 2.0**10, interval=1)
        before = rig.bits()
        bad = [batch(number, factor=(np.nan, np.inf, -np.inf)[number % 3]) for number in range(4 if few else 20)]
        bad *= 1 if few else repeated
        outputs = rig.run(bad)
        assert not any(output["applied"] for output in outputs)
        assert rig.bits() == before
        assert rig.scale() == low
        assert min(output["loss_scale"] for output in outputs) >= low
        # At a scale far below 1 float16 flushes every gradient to zero: applied, but only growth brings them back.
        clean = rig.run(batches(*range(2 if few else 5)))
        assert all(output["applied"] for output in clean)
        assert [output["loss_scale"] for output in clean] == [low * 2**n for n in range(len(clean))]
        assert int(rig.loss_scaler.counters.consecutive_skips) == 0
        assert int(rig.loss_scaler.counters.skipped) == len(bad)
        rig.assert_finite()
        assert rig.bits() != before


@pytest.mark.exhaustive_with("composed-eager", "by hand-eager", "by hand-xla")
def test_bad_data_leaves_the_scale_where_it_is(rig):
    rig.reset(low=2.0**8, initial=2.0**10, interval=2)
    before, few = rig.bits(), rig.mode != "loop"
    bad = [batch(number, y=(np.nan, np.inf, -np.inf)[number % 3]) for number in range(6 if few else 300)]
    outputs = rig.run([*bad, batch(0, factor=np.inf), *bad])
    assert not any(output["applied"] for output in outputs)
    assert rig.bits() == before
    assert [output["loss_scale"] for output in outputs] == [2.0**10] * (len(bad) + 1) + [2.0**9] * len(bad)
    clean = rig.run(batches(*range(3)))
    assert all(output["applied"] for output in clean)
    assert [output["loss_scale"] for output in clean] == [2.0**9, 2.0**9, 2.0**10]
    rig.assert_finite()


@pytest.mark.slow_with("by hand-graph")
@pytest.mark.exhaustive_with("by hand-xla", "composed-loop")
def test_gradients_come_back_from_a_deep_floor(compiled_rig):
    rig, depth = compiled_rig, 126
    rig.reset(low=2.0**-depth, initial=2.0**-depth, interval=1)
    start = rig.masters.weights[0].numpy()
    outputs = rig.run(batches(*range(depth + 20)))
    assert all(output["applied"] for output in outputs[:depth])
    assert np.abs(rig.masters.weights[0].numpy() - start).max() > 0.01
    assert outputs[-1]["loss_scale"] > 2.0
    rig.assert_finite()


def steep(strategy, mode):
    """A float16 section whose true gradients begin at about 2^19, a model that no scale of 1 or more can train."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([4], dtype="float16"), keras.layers.Dense(1, use_bias=False, dtype="float16")]
    )
    masters, optimizer = scaler.MasterWeights(model.trainable_variables), keras.optimizers.Adam(0.05)
    optimizer.build(masters.weights)
    loss_scaler = scaler.LossScaler(strategy)
    true = tf.constant([[1.0], [-2.0], [0.5], [1.5]])

    def step(x, y, factor):
        del y, factor
        with tf.GradientTape() as tape:
            hidden = tf.cast(model(x * 2.0**-8), tf.float32)
            loss = tf.reduce_mean(tf.square(hidden * 2.0**14 - x @ true * 2.0**6))
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, model.trainable_variables), masters)
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    return run_in(mode, step)


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("mode", ["loop", "xla"])
def test_a_model_that_needs_a_scale_below_1_trains(mode):
    data = batches(*range(20)) * 6
    outputs = steep(scaler.Dynamic(), mode)(data)
    assert sum(output["applied"] for output in outputs) > 60
    assert all(output["loss_scale"] < 1 for output in outputs if output["applied"])
    assert outputs[-1]["loss"] < 0.01 * outputs[0]["loss"]


def test_the_same_model_cannot_train_at_scale_1():
    assert not any(output["applied"] for output in steep(scaler.Static(1.0), "graph")(batches(*range(20))))
