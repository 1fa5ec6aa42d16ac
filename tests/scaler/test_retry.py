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

        def again(small):
            return tape.gradient(scaled, [self.weight], output_gradients=small)

        return self.loss_scaler.apply(self.optimizer, None, [self.weight], again=again)


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


@pytest.mark.slow
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


@pytest.mark.slow_with("2-xla", "1-xla")
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

        def again(small):
            seen.append(float(small))
            return tape.gradient(scaled, [weight], output_gradients=small)

        return loss_scaler.apply(keras.optimizers.SGD(1.0), None, [weight], again=again)

    outcome = take()
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    assert (float(outcome.loss_scale), float(loss_scaler.loss_scale)) == (2.0**10, 2.0**9)
    assert seen == [2.0**-n for n in range(25)]  # Down to the floor of 2^-14.


def test_a_retry_that_flushes_all_that_overflowed_is_none():
    """On its way the gradient is 2^29 times what is in front of it, and 2^-11 times in the end."""
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Dynamic(2.0**10))
    with tf.GradientTape(persistent=True) as tape:
        half = tf.cast(weight, tf.float16)
        for factor in (2.0**-20, 2.0**-20, 2.0**14, 2.0**15):
            half *= tf.constant(factor, tf.float16)
        scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(half, tf.float32)))

    def again(small):
        return tape.gradient(scaled, [weight], output_gradients=small)

    assert float(again(2.0**-24)[0][0]) == 0.0
    outcome = loss_scaler.apply(keras.optimizers.SGD(1.0), None, [weight], again=again)
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    assert (float(outcome.loss_scale), float(loss_scaler.loss_scale)) == (2.0**10, 2.0**9)


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


@pytest.mark.exhaustive_with("grows at each step", "fairseq", "headroom", "smooth", "warmup", "log normal")
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


def apply(grads=None, when=True, scale=2.0**30, persistent=True, **arguments):
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Dynamic(scale))
    with tf.GradientTape(persistent=persistent) as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * 4.0, tf.float32)))

    def again(small):
        return tape.gradient(scaled, [weight], output_gradients=small)

    arguments = {"again": again, **arguments}
    return loss_scaler, loss_scaler.apply(keras.optimizers.SGD(), grads, [weight], when=when, **arguments)


def test_where_nothing_is_applied_nothing_is_retried():
    loss_scaler, outcome = apply(when=tf.constant(False))
    assert (int(outcome.retries), float(loss_scaler.loss_scale)) == (0, 2.0**30)
    assert int(apply(when=tf.constant(True))[1].retries) > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"again": "twice"}, r"again='twice'.*function of a scalar tensor"),
        ({"again": lambda: []}, "expected a function of a scalar tensor"),
        ({"again": lambda small: None}, "returned NoneType: expected a list with a gradient for each variable"),
        ({"again": lambda small: 1.0}, "returned float: expected a list"),
        ({"grads": [tf.constant([1.0])]}, "expected None for grads"),
        ({"unscaled": True}, "takes scaled gradients"),
        ({"update": False}, "moves the scale at once"),
        ({"persistent": False}, r"GradientTape\(persistent=True\)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_arguments_that_cannot_work_are_refused(arguments, says):
    with pytest.raises(scaler.InvalidArgument, match=says):
        apply(**arguments)


def test_gradients_that_are_missing_the_second_time_are_named():
    weight, loss_scaler, calls = tf.Variable([1.0]), scaler.LossScaler(scaler.Dynamic(2.0**30)), []
    with tf.GradientTape(persistent=True) as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * 4.0, tf.float32)))

    def again(small):
        calls.append(small)
        return tape.gradient(scaled, [weight], output_gradients=small) if len(calls) == 1 else [None]

    with pytest.raises(scaler.InvalidArgument, match="returned 1 gradients, 1 of them None"):
        loss_scaler.apply(keras.optimizers.SGD(), None, [weight], again=again)
