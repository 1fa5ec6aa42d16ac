"""Guards what is true of Dynamic for every sequence of steps: its bounds, its period, its direction, its purity."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from scaler import Dynamic, Event
from scaler.strategies import DynamicState

WORDS, STEPS = 64, 96
SMALLEST, LARGEST = 2.0**-126, 2.0**126


@tf.function(
    input_signature=[
        tf.TensorSpec([None, None], tf.bool),
        *[tf.TensorSpec([], kind) for kind in (*[tf.float32, tf.int32], *[tf.float32] * 4, tf.int32, tf.bool)],
    ]
)
def loop(words, scale, interval, growth, backoff, low, high, hysteresis, consecutive):
    """The states before and after each step."""
    strategy = Dynamic(
        scale,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=low,
        max_scale=high,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
    )
    zeros = tf.zeros(tf.shape(words)[1:2], tf.int32)
    state = DynamicState(scale + tf.cast(zeros, tf.float32), zeros, hysteresis + zeros)
    traces = DynamicState(*(tf.TensorArray(value.dtype, tf.shape(words)[0] + 1) for value in state))
    traces = DynamicState(*(trace.write(0, value) for trace, value in zip(traces, state, strict=True)))
    for i in tf.range(tf.shape(words)[0]):
        state = strategy.update(state, Event(words[i]))
        traces = DynamicState(*(trace.write(i + 1, value) for trace, value in zip(traces, state, strict=True)))
    return DynamicState(*(trace.stack() for trace in traces))


def run(words, scale=2.0**15, interval=4, growth=2.0, backoff=0.5, low=SMALLEST, high=LARGEST, budget=1, again=False):
    numbers = [np.float32(x) for x in (growth, backoff, low, high)]
    states = loop(words, np.float32(scale), np.int32(interval), *numbers, np.int32(budget), np.bool_(again))
    return DynamicState(*(value.numpy() for value in states))


def random_words(seed):
    """Words from nearly all non-finite to nearly all finite."""
    return np.random.default_rng(seed).random((STEPS, WORDS)) < np.linspace(0.02, 1.0, WORDS)


some_words = st.integers(0, 2**32).map(random_words)
exponents = st.lists(st.integers(-126, 126), min_size=3, max_size=3).map(sorted)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    some_words, exponents, st.integers(1, 9), st.integers(1, 126), st.integers(1, 126), st.integers(1, 4), st.booleans()
)
def test_powers_of_two_stay_within_bounds_and_stay_powers(words, bounds, interval, up, down, budget, again):
    low, scale, high = (2.0**exponent for exponent in bounds)
    states = run(words, scale, interval, 2.0**up, 2.0**-down, low, high, budget, again)
    assert states.loss_scale.min() >= low
    assert states.loss_scale.max() <= high
    fractions, _ = np.frexp(states.loss_scale)
    assert (fractions == 0.5).all()
    assert (1 / states.loss_scale >= SMALLEST).all()
    assert (states.good_steps < interval).all()
    assert (states.budget >= 0).all()
    assert (states.budget <= budget).all()


@settings(max_examples=25)
@given(
    some_words, st.floats(1, 2.0**100, exclude_min=True, width=32), st.floats(2.0**-100, 1, exclude_max=True, width=32)
)
def test_other_factors_stay_within_bounds(words, growth, backoff):
    states = run(words, 1.0, 1, growth, backoff, 0.1, 1e10)
    assert states.loss_scale.min() >= np.float32(0.1)
    assert states.loss_scale.max() <= np.float32(1e10)


@settings(max_examples=25)
@given(some_words, st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_never_grows_on_a_nonfinite_step_and_never_shrinks_on_a_finite_one(words, interval, budget, again):
    ratio = np.diff(np.log2(run(words, 1.0, interval, budget=budget, again=again).loss_scale), axis=0)
    assert (ratio[words] >= 0).all()
    assert (ratio[~words] <= 0).all()


@pytest.mark.parametrize("before", [5, 6, 9, 40])
def test_an_interval_lowered_below_the_count_takes_effect_at_the_next_finite_step(before):
    counted = run(np.ones((before, 1), bool), 8.0, 50)
    last = DynamicState(*(tf.constant(value[-1]) for value in counted))
    assert last.good_steps.numpy() == before
    strategy = Dynamic(8.0, growth_interval=5)
    grown = strategy.update(last, Event(tf.constant([True])))
    assert (grown.loss_scale.numpy()[0], grown.good_steps.numpy()[0]) == (16.0, 0)
    skipped = strategy.update(last, Event(tf.constant([False])))
    assert (skipped.loss_scale.numpy()[0], skipped.good_steps.numpy()[0]) == (4.0, 0)


def test_an_update_is_pure():
    strategy = Dynamic(8.0, growth_interval=2, hysteresis=2)
    state = strategy.init()
    for finite in (True, False, True):
        kept = [value.numpy().copy() for value in state]
        first = strategy.update(state, Event(tf.constant(finite)))
        second = strategy.update(state, Event(tf.constant(finite)))
        assert [value.numpy() for value in first] == [value.numpy() for value in second]
        assert [value.numpy() for value in state] == kept
        state = first
    assert strategy == Dynamic(8.0, growth_interval=2, hysteresis=2)


@pytest.mark.parametrize(("low", "high"), [(SMALLEST, LARGEST), (2.0**-14, 2.0**40)])
def test_300_steps_end_on_a_bound_and_one_of_the_other_kind_leaves_it(low, high):
    for finite, bound, next_to_it in ((False, low, 2 * low), (True, high, high / 2)):
        scales = run(np.full((300, 1), finite), 2.0**15, 1, low=low, high=high).loss_scale[:, 0]
        assert scales[-1] == np.float32(bound)
        assert (np.diff(scales) * (1 if finite else -1) >= 0).all()
        back = run(np.full((1, 1), not finite), scales[-1], 1, low=low, high=high).loss_scale[:, 0]
        assert back[-1] == np.float32(next_to_it)


def test_a_spent_budget_backs_off_at_every_step_until_a_growth_refills_it():
    word = reference.word("000100111101")
    budget = run(word, 64.0, 4, budget=2).budget[1:, 0]
    scale = run(word, 64.0, 4, budget=2).loss_scale[1:, 0]
    np.testing.assert_array_equal(budget, [1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1])
    np.testing.assert_array_equal(scale, [64, 32, 16, 16, 8, 4, 4, 4, 4, 8, 8, 8])


def test_counts_that_no_run_can_reach_become_ones_that_it_can():
    strategy = Dynamic(8.0, growth_interval=9, hysteresis=2)
    foreign = DynamicState(tf.constant(8.0), tf.constant(-5), tf.constant(99))
    after = strategy.update(foreign, Event(tf.constant(True)))
    assert (after.good_steps.numpy(), after.budget.numpy()) == (1, 2)


@pytest.mark.parametrize("interval", [2**31 - 1, 2**31 - 2])
def test_the_largest_count_still_grows(interval):
    """The largest integer plus one is negative: a count from elsewhere must not reach it."""
    strategy = Dynamic(8.0, growth_interval=interval)
    foreign = DynamicState(tf.constant(8.0), tf.constant(2**31 - 1), tf.constant(1))
    after = strategy.update(foreign, Event(tf.constant(True)))
    assert [value.numpy() for value in after] == [16.0, 0, 1]
