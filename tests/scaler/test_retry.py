"""Guards retries: an overflow of the backward pass costs no batch, and what no scale helps is skipped as ever."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import scaler
from scaler import Cause

LOW = 2.0**-14
RATE = 2.0**-20
"""Of learning: the weights stay so small that no forward pass overflows."""
SLOPES = [2.0**-10, 1.0, 3.0, 2.0**10, 30000.0, 65504.0]


class Line:
    """A line through float16: its gradient overflows where float16(scale) * slope does."""

    def __init__(self, strategy, mode="eager", **arguments):
        self.weight = tf.Variable([0.0, 0.0])
        self.loss_scaler = scaler.LossScaler(strategy, **arguments)
        self.optimizer = keras.optimizers.SGD(RATE)
        self.optimizer.build([self.weight])
        options = {"eager": None, "graph": {}, "xla": {"jit_compile": True}}[mode]
        self.take = self._take if options is None else tf.function(self._take, **options)

    def _take(self, slope, loss=0.0):
        with tf.GradientTape(persistent=True) as tape:
            line = tf.cast(tf.cast(self.weight, tf.float16) * tf.cast(slope, tf.float16), tf.float32)
            scaled = self.loss_scaler.scale(tf.reduce_sum(line) + loss)
        grads = tape.gradient(scaled, [self.weight])

        def again(small):
            return tape.gradient(scaled, [self.weight], output_gradients=small)

        return self.loss_scaler.apply(self.optimizer, grads, [self.weight], again=again)


def moved(line, slopes):
    """Asserts that the weights have taken these steps, to the bit."""
    weight = np.float32(0.0)
    for slope in slopes:
        weight -= np.float32(slope * RATE)
    np.testing.assert_array_equal(line.weight, [weight, weight])


def reference(slopes, scale, interval, backoff, hysteresis):
    """What Dynamic does with them, with retries: (applied, scale of the step, retries) for each, and the last scale."""
    good, budget, seen = 0, hysteresis, []

    def overflow(scale, good, budget):
        budget -= budget > 0
        return (max(scale * backoff, LOW) if not budget else scale), 0, budget

    for slope in slopes:
        state, tries = (scale, good, budget), 0
        with np.errstate(over="ignore"):
            while not np.isfinite(np.float16(state[0]) * np.float16(slope)) and (not tries or state[0] > LOW):
                state, tries = overflow(*state), tries + 1
            applied = np.isfinite(np.float16(state[0]) * np.float16(slope))
        if not applied:
            seen.append((False, scale, 0))
            scale, good, budget = overflow(scale, good, budget)
            continue
        scale, good, budget = state
        seen.append((True, scale, tries))
        good += 1
        if good >= interval:
            scale, good, budget = min(scale * 2.0, 2.0**40), 0, hysteresis
    return seen, scale


@given(
    st.lists(st.sampled_from([*SLOPES, np.inf, np.nan]), min_size=1, max_size=6),
    st.sampled_from([2.0**40, 2.0**20, 2.0**16, 2.0**3, LOW]),
    st.integers(1, 3),
    st.sampled_from([0.5, 0.25]),
    st.integers(1, 3),
)
@settings(max_examples=25)
def test_the_scale_and_the_retries_are_those_of_a_strategy_that_sees_each_overflow(
    slopes, scale, interval, backoff, hysteresis
):
    line = Line(
        scaler.Dynamic(scale, growth_interval=interval, backoff_factor=backoff, hysteresis=hysteresis),
        stuck=scaler.StuckPolicy("continue"),
    )
    expected, last = reference(slopes, scale, interval, backoff, hysteresis)
    for slope, (applied, used, retries) in zip(slopes, expected, strict=True):
        outcome = line.take(tf.constant(slope))
        assert (bool(outcome.finite), float(outcome.loss_scale), int(outcome.retries)) == (applied, used, retries)
    assert float(line.loss_scaler.loss_scale) == last
    counts = line.loss_scaler.counters
    assert (int(counts.attempted), int(counts.applied)) == (len(slopes), sum(one for one, *_ in expected))
    moved(line, [slope for slope, (applied, *_) in zip(slopes, expected, strict=True) if applied])


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_every_mode_retries_to_the_same_bits(mode):
    line = Line(scaler.Dynamic(2.0**30), mode)
    for slope, scale, retries in [(3.0, 2.0**14, 16), (2.0**10, 2.0**5, 9), (1.0, 2.0**5, 0)]:
        outcome = line.take(tf.constant(slope))
        assert (bool(outcome.finite), float(outcome.loss_scale), int(outcome.retries)) == (True, scale, retries)
    moved(line, [3.0, 2.0**10, 1.0])


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize(("slope", "loss"), [(np.nan, 0.0), (2.0**10, np.inf)], ids=["1", "2"])
def test_a_loss_that_is_not_finite_is_skipped_once_and_costs_one_backoff(mode, slope, loss):
    line = Line(scaler.Dynamic(2.0**10), mode)
    outcome = line.take(tf.constant(slope), tf.constant(loss))
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    assert int(outcome.cause) == Cause.LOSS
    assert (float(outcome.loss_scale), float(line.loss_scaler.loss_scale)) == (2.0**10, 2.0**9)
    moved(line, [])
    assert int(line.optimizer.iterations) == 0


def test_a_backward_pass_that_no_scale_makes_finite_costs_one_backoff():
    weight, loss_scaler = tf.Variable([0.0]), scaler.LossScaler(scaler.Dynamic(2.0**10))
    seen = []

    def take():
        with tf.GradientTape(persistent=True) as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.sqrt(weight * 0.0)))
        grads = tape.gradient(scaled, [weight])

        def again(small):
            seen.append(float(small))
            return tape.gradient(scaled, [weight], output_gradients=small)

        return loss_scaler.apply(keras.optimizers.SGD(1.0), grads, [weight], again=again)

    outcome = take()
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    assert (float(outcome.loss_scale), float(loss_scaler.loss_scale)) == (2.0**10, 2.0**9)
    assert seen == [2.0**-n for n in range(1, 25)]  # Down to the floor of 2^-14.


STRATEGIES = {
    "dynamic": scaler.Dynamic(2.0**40),
    "grows at each step": scaler.Dynamic(2.0**12, growth_interval=1),
    "pytorch": scaler.presets.pytorch(),
    "fairseq": scaler.presets.fairseq(),
    "headroom": scaler.Headroom(),
    "log normal": scaler.LogNormal(),
    "smooth": scaler.Smooth(),
    "warmup": scaler.strategies.Warmup(scaler.Dynamic(2.0**30), 4),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_loses_a_batch(name):
    line = Line(STRATEGIES[name], "graph")
    slopes = [2.0**10, 3.0, 2.0**12, 1.0, 2.0**15, 5.0]
    for slope in slopes:
        assert bool(line.take(tf.constant(slope)).finite)
    if name == "smooth":  # Its scales are no powers of two.
        np.testing.assert_allclose(line.weight, [-RATE * sum(slopes)] * 2, rtol=1e-3)
    else:
        moved(line, slopes)


def test_a_scale_that_cannot_move_has_nothing_to_retry_at():
    line = Line(scaler.Static(2.0**14), "graph")
    outcome = line.take(tf.constant(2.0**10))
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    concrete = line.take.get_concrete_function(tf.constant(1.0))
    assert "StatelessWhile" not in {op.type for op in concrete.graph.get_operations()}


def test_a_scale_far_above_the_floor_is_not_flushed_to_zero_by_a_retry():
    line = Line(scaler.Dynamic(2.0**126, max_scale=2.0**126, min_scale=2.0**-126), "graph")
    assert bool(line.take(tf.constant(2.0**10)).finite)
    moved(line, [2.0**10])


def apply(**arguments):
    weight = tf.Variable([1.0])
    loss_scaler = scaler.LossScaler()
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(weight * np.inf))
    grads = [tf.constant([np.inf])]
    del tape, scaled
    return loss_scaler.apply(keras.optimizers.SGD(), grads, [weight], **arguments)


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_slices_are_retried_too(mode):
    table, loss_scaler = tf.Variable(tf.zeros([5, 2])), scaler.LossScaler(scaler.Dynamic(2.0**20))
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build([table])

    @tf.function(jit_compile=mode == "xla")
    def step():
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.gather(table, [1, 3, 1])
            scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(tf.cast(rows, tf.float16) * 8.0, tf.float32)))
        grads = tape.gradient(scaled, [table])
        assert isinstance(grads[0], tf.IndexedSlices)

        def again(small):
            return tape.gradient(scaled, [table], output_gradients=small)

        return loss_scaler.apply(optimizer, grads, [table], again=again)

    outcome = step()
    assert bool(outcome.finite)
    # XLA keeps more digits between operations.
    assert int(outcome.retries) == 8 if mode == "graph" else int(outcome.retries) > 0
    expected = np.zeros([5, 2], np.float32)
    expected[1], expected[3] = -16 * RATE, -8 * RATE
    np.testing.assert_array_equal(table, expected)


def test_arguments_that_cannot_work_are_refused():
    with pytest.raises(scaler.InvalidArgument, match=r"again='twice'.*function of a scalar tensor"):
        apply(again="twice")
    with pytest.raises(scaler.InvalidArgument, match="unscaled gradients cannot be taken again"):
        apply(again=lambda small: [small], unscaled=True)


def test_gradients_that_are_missing_the_second_time_are_named():
    line = Line(scaler.Dynamic(2.0**30))
    with tf.GradientTape() as tape:
        scaled = line.loss_scaler.scale(tf.reduce_sum(tf.cast(tf.cast(line.weight, tf.float16) * 4.0, tf.float32)))
    grads = tape.gradient(scaled, [line.weight])
    with pytest.raises(scaler.InvalidArgument, match="returned 1 gradients, 1 of them None"):
        line.loss_scaler.apply(line.optimizer, grads, [line.weight], again=lambda small: [None])
