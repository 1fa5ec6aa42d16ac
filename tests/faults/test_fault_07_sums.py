"""Fault 7: gradients that are finite one by one and overflow when summed, on a single device.

Over duplicate indices of `IndexedSlices`, over the micro-batches of a window, and in the norm used for clipping.
Guards lines 1 and 3 of the promise.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import MODES, batch, batches, run_in, spoil_gradient
from rigs import assert_finite, raw
from ways import selects

import loops
import scaler
from scaler import Cause

IDS = {"duplicates": [3, 1, 3, 3], "distinct": [0, 1, 2, 3]}


@functools.cache
def embedding(mode, kind):
    table = tf.Variable(tf.ones([4, 2], kind), name="table")
    masters, optimizer = scaler.MasterWeights([table]), keras.optimizers.Adam(0.1)
    optimizer.build(masters.weights)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0 if kind == "float16" else 2.0**40))

    def step(ids, factor):
        with tf.GradientTape() as tape:
            rows = spoil_gradient(tf.gather(table, ids), tf.cast(factor, kind))
            scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(rows, tf.float32)))
        (grad,) = tape.gradient(scaled, [table])
        assert isinstance(grad, tf.IndexedSlices)
        outcome = loss_scaler.apply(optimizer, [grad], masters, clip_norm=1.0)
        return {"applied": outcome.finite, "cause": outcome.cause}

    return run_in(mode, step), [table, *masters.weights, *optimizer.variables]


@pytest.mark.exhaustive_with("loop")
@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("mode", MODES)
def test_float32_rows_that_overflow_in_their_sum_are_skipped(mode):
    run, variables = embedding(mode, "float32")
    assert run([(np.int32(IDS["distinct"]), np.float32(1))])[0]["applied"]
    before = raw(variables)
    # The squares of 6e18 fit in float32, those of three together do not. Scaled, 2e38 fits, and three do not.
    for factor in (6e18, 2e38 / 2.0**40):
        (skipped,) = run([(np.int32(IDS["duplicates"]), np.float32(factor))])
        assert not skipped["applied"]
        assert raw(variables) == before
    assert run([(np.int32(IDS["distinct"]), np.float32(6e18))])[0]["applied"]
    assert run([(np.int32(IDS["distinct"]), np.float32(1))])[0]["applied"]
    assert_finite(variables)


@pytest.mark.slow_with("loop")
@pytest.mark.exhaustive_with("xla")
@pytest.mark.parametrize("mode", MODES)
def test_float16_rows_are_summed_in_float32(mode):
    run, variables = embedding(mode, "float16")
    (outputs,) = run([(np.int32(IDS["duplicates"]), np.float32(60000))])
    assert outputs["applied"]
    assert_finite(variables)


@functools.cache
def accumulated(mode):
    """Windows of four; Static scale 1, so that gradients are what the factor makes of them."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input([4]), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def loss_fn(y, prediction, factor):
        return 4.0 * tf.reduce_mean(spoil_gradient(prediction, factor))

    step = loops.TrainStep(model, loss_fn, optimizer, accumulate=4, clip_norm=1.0)
    outputs = ("attempted", "applied")
    run = run_in(mode, lambda *one: {name: value for name, value in step(one).items() if name in outputs})
    return run, [*model.variables, *optimizer.variables], [*step.variables, *model.variables]


@pytest.mark.exhaustive_with("down-loop", "down-xla", "up-loop", "up-xla")
@pytest.mark.parametrize("mode", ["eager", "loop", "xla"])
@pytest.mark.parametrize("huge", [3e38, -3e38], ids=["up", "down"])
def test_a_window_whose_sum_overflows_is_one_skipped_step(mode, huge):
    run, moved, every = accumulated(mode)
    assert run(batches(1, 2, 3, 4))[3]["applied"]
    before = raw(moved)
    # The bias has a gradient of 3e38 in each, and of infinity in two.
    window = run([batch(number, factor=huge) for number in range(4)])
    assert [bool(one["attempted"]) for one in window] == [False, False, False, True]
    assert not window[3]["applied"]
    assert raw(moved) == before
    assert_finite(every)
    assert run(batches(5, 6, 7, 8))[3]["applied"]
    assert_finite(every)


@pytest.mark.exhaustive_with("loop", "xla")
@pytest.mark.parametrize("mode", ["eager", "loop", "xla"])
def test_a_window_of_finite_micro_batches_with_an_infinite_sum_stores_no_infinity(mode):
    run, moved, every = accumulated(mode)
    run(batches(1, 2, 3, 4))
    before = raw(moved)
    for position in range(4):
        run([batch(position, factor=3.3e38)] * (position + 1))
        assert_finite(every)
        run(batches(*range(3 - position)))
    # In the first window only the square overflows, in the others the sum.
    assert raw(moved) == before


@functools.cache
def clipped(mode):
    weights = [tf.Variable(tf.ones([2]), name=name) for name in ("a", "b", "c")]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(weights)
    loss_scaler = scaler.LossScaler(scaler.Static(2.0**-10))

    def step(factors):
        with tf.GradientTape() as tape:
            total = tf.add_n([tf.reduce_sum(weight) * factors[i] for i, weight in enumerate(weights)])
            scaled = loss_scaler.scale(total)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights, clip_norm=1.0)
        return {"applied": outcome.finite, "cause": outcome.cause, "index": outcome.index, "norm": outcome.grad_norm}

    return run_in(mode, step), [*weights, *optimizer.variables]


@pytest.mark.exhaustive_with("loop")
@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("mode", MODES)
def test_a_norm_that_overflows_does_not_clip_to_zero(mode):
    run, variables = clipped(mode)
    assert run([(np.float32([1, 1, 1]),)])[0]["applied"]
    before = raw(variables)
    # 8e18 squared twice is 1.3e38: each variable's share is finite, the sum of the three is not.
    together, alone = run([(np.float32([8e18, 9e18, 8e18]),), (np.float32([1, 1, 1e20]),)])
    for skipped, index in ((together, 1), (alone, 2)):
        assert not skipped["applied"]
        # A squared norm that is infinite by itself may stand for an infinity, where nothing else is looked at.
        assert skipped["cause"] == (Cause.OVERFLOW if selects(mode) and skipped is alone else Cause.TOO_LARGE)
        assert skipped["index"] == index
        assert not np.isfinite(skipped["norm"])
    assert raw(variables) == before
    (fits,) = run([(np.float32([8e18, 1, 1]),)])
    assert fits["applied"]
    assert np.isfinite(fits["norm"])
    np.testing.assert_allclose(variables[0].numpy(), variables[0].numpy()[0])
    assert_finite(variables)
