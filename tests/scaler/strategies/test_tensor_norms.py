"""Guards the windows that `SpikeGuard(by_tensor=)` keeps of each gradient: equal, bit for bit, to plain Python."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from spike_cases import INNER, WINDOW, Guarded, random_norms, reference
from strategy_cases import WORDS, assert_equal_traces, random_flags, seeds

from scaler import Event, SpikeGuard

VARIABLES = 3


class Knowing(SpikeGuard):
    """A guard that knows from the first step on how many variables there are."""

    def init(self):
        return super().init(VARIABLES)


@pytest.mark.slow_with("clip")
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_the_states_are_those_of_plain_python(by_tensor):
    runner = Guarded(functools.partial(Knowing, INNER, window=WINDOW, by_tensor=by_tensor))
    machine = functools.partial(reference, by_tensor=by_tensor, tensors=VARIABLES)

    @settings(max_examples=2)
    @given(rng=seeds)
    def same(rng):
        finite = random_flags(rng) | (rng.random(WORDS) < 0.7)
        whole = random_norms(rng, finite)
        own = np.stack([random_norms(rng, finite)[:, 0] for _ in range(VARIABLES)], axis=1)
        # A gradient that a step does not have.
        own = np.where(rng.random(own.shape) < 0.05, np.nan, own).astype(np.float32)
        numbers = {"factor": rng.choice([20.0, 1.0, 3.7, 1e30], WORDS).astype(np.float32)}
        statistic = np.concatenate([whole, own], axis=1)
        got = runner("loop", finite, statistic, numbers)
        got.pop("budget")
        assert_equal_traces(got, machine, finite, statistic, numbers)
        seen.append(got["spikes"][-1])

    seen = []
    same()
    assert np.median(seen) >= 1


def steady(by_tensor, **arguments):
    """A guard and its state after five steps with norms of 1, 10 and 100."""
    guard = SpikeGuard(INNER, window=5, norm=False, loss=False, by_tensor=by_tensor, **arguments)
    state = guard.init(VARIABLES)
    for _ in range(5):
        state = guard.update(state, event(1.0, 10.0, 100.0))
    return guard, state


def event(*norms):
    return Event(tf.constant(True), norms=tf.constant(norms))


def test_each_gradient_has_a_limit_of_its_own():
    guard, state = steady("skip")
    assert not bool(guard.is_spike(state, event(3.0, 30.0, 300.0)))
    for place, norms in enumerate([(3.01, 10.0, 100.0), (1.0, 30.1, 100.0), (1.0, 10.0, 301.0)]):
        found = guard.verdict(state, None, None, tf.constant(norms))
        assert (bool(found.spike), int(found.tensor), int(found.beyond)) == (True, place, 1)
        np.testing.assert_allclose(
            [found.value, found.usual, found.limit], [norms[place], 10.0**place, 3 * 10.0**place]
        )


def test_the_one_that_is_the_most_times_its_limit_is_named():
    guard, state = steady("skip")
    found = guard.verdict(state, None, None, tf.constant([300.0, 31.0, 30_000.0]))
    assert (int(found.tensor), int(found.beyond)) == (0, 3)
    found = guard.verdict(state, None, None, tf.constant([300.0, 31.0, 40_000.0]))
    assert (int(found.tensor), int(found.beyond)) == (2, 3)


def test_a_gradient_that_is_clipped_is_no_spike_and_comes_down_to_its_limit():
    guard, state = steady("clip")
    norms = tf.constant([2.0, 300.0, 100.0])
    assert not bool(guard.is_spike(state, event(*norms.numpy())))
    np.testing.assert_allclose(guard.factors(state, norms) * norms, [2.0, 30.0, 100.0], rtol=1e-6)
    # Exactly 1, so that a step without such a gradient has the bits of one without the guard.
    assert guard.factors(state, norms).numpy()[[0, 2]].tolist() == [1.0, 1.0]
    # What enters the window is the norm before the clipping: another level is learnt, and not clipped for ever.
    for _ in range(3):
        state = guard.update(state, event(1.0, 300.0, 100.0))
    assert float(state.tensor_limits[1]) > 300.0


def test_norms_in_float64_have_factors_in_float64():
    guard, state = steady("clip")
    norms = tf.constant([1e150, 3e1 * (1 + 1e-12), math.nan], tf.float64)
    factors = guard.factors(state, norms)
    assert factors.dtype == tf.float64
    np.testing.assert_allclose(factors[0] * norms[0], float(state.tensor_limits[0]), rtol=1e-15)
    assert factors.numpy()[1:].tolist() == [1.0, 1.0]


def test_a_gradient_that_is_not_there_leaves_its_window_alone():
    guard, state = steady("skip")
    after = guard.update(state, event(1.0, math.nan, 100.0))
    assert after.tensor_norms[:, 1].numpy().tolist() == state.tensor_norms[:, 1].numpy().tolist()
    assert float(after.tensor_limits[1]) == float(state.tensor_limits[1])
