"""Guards the state machine of `SpikeGuard`: equal, bit for bit, to plain Python, and what it refuses."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from spike_cases import INNER, WINDOW, Guarded, random_norms, reference
from strategy_cases import WORDS, assert_equal_traces, random_flags, seeds

import scaler
from scaler import Event, InvalidArgument, SpikeGuard
from scaler.strategies import Bounded, Needs, RisingFloor, Scheduled, Warmup

LARGEST = 3.0
"""In the middle of the random norms."""


@pytest.mark.slow_with("any-xla")
@pytest.mark.parametrize(("largest", "how"), [(LARGEST, "loop"), (None, "xla")], ids=["limited-loop", "any-xla"])
def test_the_states_are_those_of_plain_python(largest, how):
    machine = functools.partial(reference, largest=largest or math.inf)
    runner = Guarded(functools.partial(SpikeGuard, INNER, window=WINDOW, largest_norm=largest))

    @settings(max_examples=2)
    @given(rng=seeds)
    def same(rng):
        finite = random_flags(rng) | (rng.random(WORDS) < 0.7)
        statistic = random_norms(rng, finite)
        numbers = {"factor": rng.choice([20.0, 1.0, 3.7, 1e-3, 1e30], WORDS).astype(np.float32)}
        got = runner(how, finite, statistic, numbers)
        # The budget is Dynamic's own affair.
        got.pop("budget")
        assert_equal_traces(got, machine, finite, statistic, numbers)
        seen.append(got["spikes"][-1])

    seen = []
    same()
    assert np.median(seen) >= 1


def after(strategy, *events):
    state = strategy.init()
    for norm, loss in events:
        state = strategy.update(state, Event(tf.constant(True), norm=tf.constant(norm), loss=tf.constant(loss)))
    return state


def is_spike(strategy, state, norm, loss):
    return bool(strategy.is_spike(state, Event(tf.constant(True), norm=tf.constant(norm), loss=tf.constant(loss))))


STEADY = [(2.0, 1.0)] * 10


def test_a_norm_or_a_loss_of_three_times_the_median_is_allowed_and_more_is_not():
    strategy = SpikeGuard(INNER, window=10)
    state = after(strategy, *STEADY)
    assert not is_spike(strategy, state, 6.0, 3.0)
    assert is_spike(strategy, state, 6.001, 1.0)
    assert is_spike(strategy, state, 2.0, 3.001)


def test_no_step_is_a_spike_before_half_of_the_window_is_filled():
    strategy = SpikeGuard(INNER, window=10)
    assert not is_spike(strategy, after(strategy, *STEADY[:5]), 1e30, 1e30)
    assert is_spike(strategy, after(strategy, *STEADY[:6]), 1e30, 1.0)


def test_the_largest_norm_holds_from_the_first_step_and_beside_the_relative_limit():
    strategy = SpikeGuard(INNER, window=10, largest_norm=100.0)
    assert not is_spike(strategy, strategy.init(), 100.0, 1.0)
    assert is_spike(strategy, strategy.init(), 100.01, 1.0)
    assert is_spike(strategy, after(strategy, *STEADY), 7.0, 1.0)
    large = after(strategy, *[(50.0, 1.0)] * 10)
    assert not is_spike(strategy, large, 99.0, 1.0)
    assert is_spike(strategy, large, 101.0, 1.0)
    assert float(large.norm_limit) == 100.0


def test_the_largest_norm_alone():
    strategy = SpikeGuard(INNER, norm=False, loss=False, largest_norm=100.0)
    state = after(strategy, *STEADY)
    assert not is_spike(strategy, state, 100.0, 1e30)
    assert is_spike(strategy, state, 100.01, 1.0)
    assert strategy.needs == Needs(norm=True)


def test_a_loss_that_is_not_known_is_not_judged():
    strategy = SpikeGuard(INNER, window=5)
    state = after(strategy, *[(2.0, math.nan)] * 5)
    assert is_spike(strategy, state, 100.0, math.nan)
    assert not is_spike(strategy, state, 2.0, 1e30)


def test_the_strategy_does_not_see_a_spike():
    strategy = SpikeGuard(INNER, window=5)
    before = after(strategy, *STEADY[:5])
    state = strategy.update(before, Event(tf.constant(True), norm=tf.constant(1e6), loss=tf.constant(1.0)))
    moved = [field for field in state._fields if not np.array_equal(getattr(state, field), getattr(before, field))]
    assert moved == ["spikes", "spikes_in_a_row", "last_spike"]
    assert state.last_spike.numpy().tolist() == [1e6, 2.0, 6.0]


def test_needs_and_bounds():
    assert SpikeGuard(INNER).needs == Needs(norm=True, loss=True)
    assert SpikeGuard(scaler.Headroom(), loss=False).needs == Needs(amax=True, norm=True)
    assert (SpikeGuard(INNER).min_scale, SpikeGuard(INNER).max_scale) == (2.0**-4, 2.0**8)
    assert [SpikeGuard(INNER, window=w, share=s).most_in_a_row for w, s in ((100, 0.1), (3, 0.1), (10, 1.0))] == [
        10,
        1,
        10,
    ]


REFUSED = [
    *[{"factor": factor} for factor in (0.0, math.inf, True)],
    *[{"window": window} for window in (2, 2.5, tf.constant(5))],
    *[{"share": share} for share in (0.0, 1.5)],
    {"norm": 1},
    {"norm": False, "loss": False},
    *[{"largest_norm": norm} for norm in (0.0, math.inf, True, tf.constant(5.0))],
    *[{"by_tensor": value} for value in ("Skip", True, 4, tf.constant("skip"))],
]


def test_what_cannot_work_is_named(snapshot):
    said = []
    for arguments in REFUSED:
        with pytest.raises(InvalidArgument) as caught:
            SpikeGuard(INNER, **arguments)
        said.append(str(caught.value))
    assert said == snapshot


@pytest.mark.parametrize(
    "hold",
    [
        SpikeGuard,
        lambda inner: Warmup(inner, 5),
        lambda inner: Bounded(inner, 1.0, 2.0),
        RisingFloor,
        lambda inner: Scheduled({0: inner}),
        lambda inner: scaler.PerLoss({"task": inner}),
        lambda inner: scaler.layerwise.Layerwise({"all": [tf.Variable(1.0)]}, strategy=inner),
    ],
    ids=["SpikeGuard", "Warmup", "Bounded", "RisingFloor", "Scheduled", "PerLoss", "Layerwise"],
)
def test_a_guard_goes_around_all_others(hold):
    with pytest.raises(InvalidArgument, match="around all other strategies"):
        hold(SpikeGuard(INNER))


BY_TENSOR = SpikeGuard(INNER, norm=False, loss=False, by_tensor="skip")


@pytest.mark.parametrize(
    ("strategy", "statistics", "named"),
    [
        (SpikeGuard(INNER), {}, "the event has no norm"),
        (SpikeGuard(INNER), {"norm": tf.constant(1), "loss": tf.constant(1.0)}, "norm is int32"),
        (BY_TENSOR, {}, "the event has no norms"),
        (BY_TENSOR, {"norms": tf.constant(1.0)}, r"norms is float32 of shape \(\)"),
        (BY_TENSOR, {"norms": [1, 2]}, "norms is int32"),
    ],
)
def test_an_event_without_the_norms_is_named(strategy, statistics, named):
    with pytest.raises(InvalidArgument, match=named):
        scaler.LossScaler(strategy).update(Event(tf.constant(True), **statistics))
