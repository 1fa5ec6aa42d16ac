"""Guards retries: an overflow of the backward pass costs no batch, and what no scale helps is skipped as ever."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scaler_cases import said
from ways import graph

import scaler
from scaler import Cause

LOW = 2.0**-14
RATE = 2.0**-20
"""Of learning: the weights stay so small that no forward pass overflows."""
SLOPES = [2.0**-10, 1.0, 3.0, 2.0**10, 30000.0, 65504.0]
HILL = [2.0**15, 2.0**14, 2.0**-20, 2.0**-20]
"""What the gradient of a steep weight passes: it overflows on the way up, and is flushed to zero on the way down."""


class Line:
    """A line through float16: its gradient overflows where float16(scale) * slope does.

    With `steep` a second weight takes part, which has a slope of its own and lies behind the hill.
    """

    def __init__(self, strategy, mode="eager", steep=False, **arguments):
        self.weight, self.steep = tf.Variable([0.0, 0.0]), tf.Variable([0.0])
        self.weights = [self.weight, self.steep] if steep else [self.weight]
        self.hill = HILL[::-1] if steep else []
        self.loss_scaler = scaler.LossScaler(strategy, **arguments)
        self.optimizer = keras.optimizers.SGD(RATE)
        self.optimizer.build(self.weights)
        self.take = self._take if mode == "eager" else graph(self._take, jit_compile=mode == "xla" or None)

    def variables(self):
        return [*self.weights, *self.optimizer.variables, *self.loss_scaler.variables]

    def step(self, slope, loss=0.0, steep=0.0):
        """Takes a step with Python's numbers."""
        return self.take(tf.constant(slope), tf.constant(loss), tf.constant(steep))

    def _take(self, slope, loss, steep):
        with tf.GradientTape(persistent=True) as tape:
            line = tf.cast(tf.cast(self.weight, tf.float16) * tf.cast(slope, tf.float16), tf.float32)
            behind = tf.cast(self.steep, tf.float16)
            for factor in self.hill:
                behind *= tf.constant(factor, tf.float16)
            behind = tf.cast(behind * tf.cast(steep, tf.float16), tf.float32)
            scaled = self.loss_scaler.scale(tf.reduce_sum(line) + tf.reduce_sum(behind) + loss)

        def again(small):
            return tape.gradient(scaled, self.weights, output_gradients=small)

        return self.loss_scaler.apply(self.optimizer, None, self.weights, again=again)


@functools.cache
def _traced(mode):
    line = Line(scaler.Dynamic(2.0**30), mode)
    return line, [variable.numpy() for variable in line.variables()]


def fresh(mode):
    """A line without a steep weight, at a scale of 2^30, that is traced once a mode."""
    line, start = _traced(mode)
    for variable, value in zip(line.variables(), start, strict=True):
        variable.assign(value)
    return line


def moved(line, slopes):
    """Asserts that the weights have taken these steps, to the bit."""
    weight = np.float32(0.0)
    for slope in slopes:
        weight -= np.float32(slope * RATE)
    np.testing.assert_array_equal(line.weight, [weight, weight])


def gradients_at(scale, slope, steep):
    """The gradients of a line and of a steep weight in float16, operation by operation; of a line alone without one."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        line = np.float16(scale) * np.float16(slope)
        behind = [] if steep is None else [np.float16(scale) * np.float16(steep)]
        for factor in HILL:
            behind = [one * np.float16(factor) for one in behind]
    return np.array([line, *behind])


def reference(steps, scale, interval, backoff, hysteresis):
    """What Dynamic does with (slope, steep) of each step, with retries.

    Returns (applied, scale of the step, retries, unscaled gradients) for each, and the last scale.
    """
    good, budget, seen = 0, hysteresis, []

    def overflow(scale, good, budget):
        budget -= budget > 0
        return (max(scale * backoff, LOW) if not budget else scale), 0, budget

    for slope, steep in steps:
        if not np.isfinite(slope):  # Nor is the loss, which costs no scale.
            seen.append((False, scale, 0, [0.0]))
            continue
        state, tries = (scale, good, budget), 0
        first = found = gradients_at(scale, slope, steep)
        while not np.isfinite(found).all() and (not tries or state[0] > LOW):
            state, tries = overflow(*state), tries + 1
            found = gradients_at(state[0], slope, steep)
        lost = ~np.isfinite(first) & (found == 0)
        applied = np.isfinite(found).all() and not lost.any()
        if not applied:
            seen.append((False, scale, 0, [0.0] * len(found)))
            scale, good, budget = overflow(scale, good, budget)
            continue
        scale, good, budget = state
        seen.append((True, scale, tries, found.astype(np.float32) / np.float32(scale)))
        good += 1
        if good >= interval:
            scale, good, budget = min(scale * 2.0, 2.0**40), 0, hysteresis
    return seen, scale


@pytest.mark.exhaustive
@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*SLOPES, np.inf, np.nan]), st.sampled_from([*[0.0] * 3, 2.0**-13, 2.0**-8, 1.0, 1.5, 2.0])
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([2.0**40, 2.0**20, 2.0**16, 2.0**3, LOW]),
    st.integers(1, 3),
    st.sampled_from([0.5, 0.25]),
    st.integers(1, 3),
)
@settings(max_examples=25)
def test_the_scale_and_the_retries_are_those_of_a_strategy_that_sees_each_overflow(
    steps, steep, scale, interval, backoff, hysteresis
):
    line = Line(
        scaler.Dynamic(scale, growth_interval=interval, backoff_factor=backoff, hysteresis=hysteresis),
        steep=steep,
        stuck=scaler.StuckPolicy("continue"),
    )
    slopes = [slope for slope, _ in steps]
    seen = [(slope, own if steep else None) for slope, own in steps]
    expected, last = reference(seen, scale, interval, backoff, hysteresis)
    behind = np.float32(0.0)
    for (slope, own), (applied, used, retries, grads) in zip(steps, expected, strict=True):
        outcome = line.step(slope, steep=own if steep else 0.0)
        assert (bool(outcome.finite), float(outcome.loss_scale), int(outcome.retries)) == (applied, used, retries)
        behind -= np.float32(RATE) * np.float32(grads[-1])
    assert not steep or float(line.steep[0]) == behind
    assert float(line.loss_scaler.loss_scale) == last
    counts = line.loss_scaler.counters
    assert (int(counts.attempted), int(counts.applied)) == (len(slopes), sum(one for one, *_ in expected))
    moved(line, [slope for slope, (applied, *_) in zip(slopes, expected, strict=True) if applied])


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_every_mode_retries_to_the_same_bits(mode):
    line = fresh(mode)
    for slope, scale, retries in [(3.0, 2.0**14, 16), (2.0**10, 2.0**5, 9), (1.0, 2.0**5, 0)]:
        outcome = line.step(slope)
        assert (bool(outcome.finite), float(outcome.loss_scale), int(outcome.retries)) == (True, scale, retries)
    moved(line, [3.0, 2.0**10, 1.0])


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize(("slope", "loss"), [(np.nan, 0.0), (2.0**10, np.inf)], ids=["1", "2"])
def test_a_loss_that_is_not_finite_is_skipped_once_and_costs_no_scale(mode, slope, loss):
    line = fresh(mode)
    outcome = line.step(slope, loss)
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    assert int(outcome.cause) == Cause.LOSS
    assert float(outcome.loss_scale) == float(line.loss_scaler.loss_scale) == 2.0**30
    moved(line, [])
    assert int(line.optimizer.iterations) == 0


def eagerly(weight, loss_of, scale):
    """A step with retries: its outcome, its scaler, and what the gradients are asked for again with."""
    loss_scaler, seen = scaler.LossScaler(scaler.Dynamic(scale)), []
    with tf.GradientTape(persistent=True) as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(loss_of(weight), tf.float32)))

    def again(small):
        seen.append(float(small))
        return [tape.gradient(scaled, weight, output_gradients=small)]

    return loss_scaler.apply(keras.optimizers.SGD(1.0), None, [weight], again=again), loss_scaler, seen, again


def test_a_backward_pass_that_no_scale_makes_finite_costs_one_backoff():
    outcome, loss_scaler, seen, _ = eagerly(tf.Variable([0.0]), lambda weight: tf.sqrt(weight * 0.0), 2.0**10)
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    assert (float(outcome.loss_scale), float(loss_scaler.loss_scale)) == (2.0**10, 2.0**9)
    assert seen == [2.0**-n for n in range(25)]  # Down to the floor of 2^-14.


def test_a_retry_that_flushes_one_of_two_weights_is_none():
    """The line alone comes back at 2^9. The steep weight overflows down to where it is flushed to zero."""
    assert gradients_at(2.0**9, 64.0, 2.0).tolist() == [2.0**15, np.inf]
    assert gradients_at(2.0**-14, 64.0, 2.0).tolist() == [2.0**-8, np.inf]
    assert gradients_at(2.0**-14, 64.0, 1.0).tolist() == [2.0**-8, 0.0]
    line = Line(scaler.Dynamic(2.0**15), steep=True)
    outcome = line.step(64.0, steep=1.0)
    assert (bool(outcome.finite), int(outcome.retries), int(outcome.cause)) == (False, 0, Cause.OVERFLOW)
    assert (float(outcome.loss_scale), float(line.loss_scaler.loss_scale)) == (2.0**15, 2.0**14)
    moved(line, [])
    # What does come back is retried as ever.
    outcome = line.step(64.0, steep=1.5)
    assert (bool(outcome.finite), float(outcome.loss_scale)) == (True, 2.0**-14)
    moved(line, [64.0])
    assert float(line.steep[0]) == -RATE * 2.0**-10


def test_values_that_are_zero_in_truth_do_not_keep_a_retry_from_helping():
    """A pixel that is always black: an infinity times zero is NaN, and zero at each lower scale."""
    weight = tf.Variable([0.0, 0.0])
    outcome, _, _, again = eagerly(
        weight, lambda weight: tf.cast(weight, tf.float16) * tf.constant([1.0, 0.0], tf.float16), 2.0**20
    )
    assert np.isnan(again(1.0)[0][1])
    assert (bool(outcome.finite), int(outcome.retries)) == (True, 5)
    np.testing.assert_array_equal(weight, [-1.0, 0.0])


def test_the_retries_of_a_spike_do_not_cost_the_scale():
    line = Line(scaler.SpikeGuard(scaler.Dynamic(2.0**14, growth_interval=100), window=4))

    def step(slope):
        outcome = line.step(slope)
        state = line.loss_scaler.state
        log2_scale = float(np.log2(state.loss_scale))
        return Cause(int(outcome.cause)), int(outcome.retries), log2_scale, int(state.good_steps)

    assert [step(2.0) for _ in range(4)] == [(Cause.NONE, 0, 14.0, streak) for streak in (1, 2, 3, 4)]
    # From 2^14 to 2^9: an overflow and a spike.
    assert step(64.0) == (Cause.SPIKE, 5, 14.0, 4)
    assert "The loss scale did not move" in line.loss_scaler.explain()
    # A retry that ends in an applied step costs what it costs, and a later spike does not give that back.
    assert step(4.0) == (Cause.NONE, 1, 13.0, 1)
    assert step(7.9) == (Cause.SPIKE, 0, 13.0, 1)
    assert step(2.0) == (Cause.NONE, 0, 13.0, 2)


def test_a_scale_that_cannot_move_has_nothing_to_retry_at():
    line = Line(scaler.Static(2.0**14), "graph")
    outcome = line.step(2.0**10)
    assert (bool(outcome.finite), int(outcome.retries)) == (False, 0)
    concrete = line.take.get_concrete_function(*map(tf.constant, (1.0, 0.0, 0.0)))
    assert "StatelessWhile" not in {op.type for op in concrete.graph.get_operations()}


def test_a_scale_far_above_the_floor_is_not_flushed_to_zero_by_a_retry():
    line = Line(scaler.Dynamic(2.0**126, max_scale=2.0**126, min_scale=2.0**-126, backoff_factor=2.0**-8))
    assert bool(line.step(2.0**9).finite)
    moved(line, [2.0**9])


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


def test_arguments_that_cannot_work_are_refused(snapshot):
    given = {
        "a word": {"again": "twice"},
        "a function without an argument": {"again": lambda: []},
        "a function that returns nothing": {"again": lambda small: None},
        "a function that returns a number": {"again": lambda small: 1.0},
        "gradients too": {"grads": [tf.constant([1.0])]},
        "unscaled ones": {"unscaled": True},
        "no update": {"update": False},
        "a tape that is used up": {"persistent": False},
    }
    told = {name: said(lambda one=one: apply(**one)) for name, one in given.items()}
    assert told == snapshot


def test_gradients_that_are_missing_the_second_time_are_named():
    given = iter(([tf.constant([np.inf])], [None]))
    with pytest.raises(scaler.InvalidArgument, match="returned 1 gradients, 1 of them None"):
        apply(again=lambda small: next(given))
