"""Fault 7: gradients that are finite one by one and overflow when summed, on a single device.

Over duplicate indices of `IndexedSlices`, over the micro-batches of a window, and in the norm used for clipping.
Guards lines 1 and 3 of the promise.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, run_in, spoil_gradient
from rigs import assert_finite, raw
from ways import selects

import loops
import scaler
from scaler import Cause

DUPLICATES, DISTINCT = (3, 1, 3, 3), (0, 1, 2, 3)
WEIGHTS = [
    *(("table", [4, 2], "float32"), ("narrow", [4, 2], "float16")),
    *((name, [2], "float32") for name in ("a", "b", "c")),
]


class Summed:
    """Two tables of which rows are read, three vectors with gradients as given, and one norm of all: clipped."""

    def __init__(self, mode):
        weights = [tf.Variable(tf.ones(shape, kind), name=name) for name, shape, kind in WEIGHTS]
        masters, optimizer = scaler.MasterWeights(weights), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(masters.weights)
        self.scale = tf.Variable(1.0)
        loss_scaler = scaler.LossScaler(scaler.Static(self.scale))
        self.vectors, self.variables = weights[2:], [*weights, *masters.weights, *optimizer.variables]

        def step(ids, factor, narrow, factors):
            with tf.GradientTape() as tape:
                wide = spoil_gradient(tf.gather(weights[0], ids), factor)
                rows = spoil_gradient(tf.gather(weights[1], ids), tf.cast(narrow, tf.float16))
                parts = tf.stack([tf.reduce_sum(vector) for vector in weights[2:]])
                total = tf.reduce_sum(wide + tf.cast(rows, tf.float32)) + tf.reduce_sum(parts * factors)
                scaled = loss_scaler.scale(total)
            grads = tape.gradient(scaled, weights)
            assert isinstance(grads[0], tf.IndexedSlices)
            assert isinstance(grads[1], tf.IndexedSlices)
            return loss_scaler.apply(optimizer, grads, masters, clip_norm=1.0)._asdict()

        self._run = run_in(mode, step)

    def take(self, ids=DISTINCT, factor=1.0, narrow=0.0, factors=(1, 1, 1)):
        (output,) = self._run([(np.int32(ids), np.float32(factor), np.float32(narrow), np.float32(factors))])
        return output


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_sums_of_rows_and_of_squares_that_overflow_are_skipped(mode):
    summed = Summed(mode)
    # Rows of float16 are summed in float32.
    assert summed.take(DUPLICATES, narrow=60000)["finite"]
    before = raw(summed.variables)
    # The squares of 6e18 fit in float32, those of three together do not. 2e38 itself fits, and three do not.
    for factor in (6e18, 2e38):
        assert not summed.take(DUPLICATES, factor)["finite"]
        assert raw(summed.variables) == before
    summed.scale.assign(2.0**-10)
    # 8e18 squared twice is 1.3e38: each variable's share is finite, the sum of the three is not.
    together, alone = summed.take(factors=[8e18, 9e18, 8e18]), summed.take(factors=[1, 1, 1e20])
    for skipped, index in ((together, 3), (alone, 4)):
        assert not skipped["finite"]
        # A squared norm that is infinite by itself may stand for an infinity, where nothing else is looked at.
        assert skipped["cause"] == (Cause.OVERFLOW if selects(mode) and skipped is alone else Cause.TOO_LARGE)
        assert skipped["index"] == index
        assert not np.isfinite(skipped["grad_norm"])
    assert raw(summed.variables) == before
    # What fits is clipped, and not to zero.
    for fits in (summed.take(factor=6e18), summed.take(factors=[8e18, 1, 1]), summed.take()):
        assert fits["finite"]
        assert np.isfinite(fits["grad_norm"])
    for vector in summed.vectors:
        assert vector.numpy()[0] == vector.numpy()[1] < 1.0
    assert_finite(summed.variables)


def test_a_window_whose_sum_overflows_is_one_skipped_step_and_stores_no_infinity():
    """Of four micro-batches in a graph, at a scale of 1, so that gradients are what the factor makes of them."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input([4]), keras.layers.BatchNormalization(scale=False), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def loss_fn(y, prediction, factor):
        return 4.0 * tf.reduce_mean(spoil_gradient(prediction, factor))

    step = loops.TrainStep(model, loss_fn, optimizer, accumulate=4, clip_norm=1.0)
    run = run_in("graph", lambda *one: step(one))
    moved, every = [*model.variables, *optimizer.variables], [*step.variables, *model.variables]
    assert run(batches(1, 2, 3, 4))[3]["applied"]
    before = raw(moved)
    # The bias has this gradient in each. Of one it is the square that overflows, of two the sum.
    for huge in ([3.3e38], [-3e38] * 2, [3e38] * 4):
        window = run([batch(number, factor=factor) for number, factor in enumerate(huge)])
        assert_finite(every)
        window += run(batches(*range(4 - len(huge))))
        assert [bool(one["attempted"]) for one in window] == [False, False, False, True]
        assert not window[3]["applied"]
        assert raw(moved) == before
        assert_finite(every)
    assert run(batches(5, 6, 7, 8))[3]["applied"]
    assert_finite(every)
