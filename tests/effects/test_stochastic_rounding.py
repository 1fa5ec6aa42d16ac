"""Guards the fixed point of the page on rounding at random, and what the page claims of given numbers."""

import fractions
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.effects import stochastic_rounding
from benchmarks.effects.effect import written
from benchmarks.effects.networks import Ends
from benchmarks.effects.stochastic_rounding import FLOATS, WORDS, fewest_bits, fixed_point, rounded

FORMATS = (*WORDS, *FLOATS)


def nearest(value, fraction):
    """By exact arithmetic, ties to even, within [-32, 32)."""
    whole = round(fractions.Fraction(value) * 2**fraction)
    return min(max(whole, -(2 ** (fraction + 5))), 2 ** (fraction + 5) - 1) / 2**fraction


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20), st.integers(0, 16))
def test_fixed_point_is_the_nearest_multiple(values, fraction):
    found = fixed_point(tf.constant(values, tf.float32), fraction).numpy()
    # Kernels of a CPU take subnormal numbers for 0, and so does rounding to a multiple.
    assert found.tolist() == [nearest(value, fraction) for value in values]


def test_ties_go_to_even_multiples_and_large_values_saturate():
    found = fixed_point(tf.constant([0.125, 0.375, -0.125, 31.99, 40.0, -40.0]), 2)
    assert found.numpy().tolist() == [0.0, 0.5, 0.0, 31.75, 31.75, -32.0]


@pytest.mark.parametrize("value", [0.3, -0.3, 1e-3, 17.01])
def test_at_random_one_of_the_neighbours_is_drawn_with_the_right_mean(value):
    found = fixed_point(tf.fill([20_000], value), 4, (1, 2)).numpy()
    below = math.floor(np.float32(value) * 16) / 16
    assert set(found) == {below, below + 1 / 16}
    assert found.mean() == pytest.approx(value, abs=4 / 16 / 2 / math.sqrt(len(found)))


def test_a_seed_draws_the_same_numbers_and_another_does_not():
    values = tf.random.stateless_uniform([200], [0, 1])
    one, again, other = (fixed_point(values, 4, seed).numpy() for seed in ((1, 2), (1, 2), (1, 3)))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_what_is_held_stays_as_it_is_also_at_random():
    held = tf.range(-128.0, 128.0) / 4
    np.testing.assert_array_equal(fixed_point(held, 2, (0, 0)), held)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({10: 0.5, 12: 0.005, 14: 0.0}, 12),
        ({10: 0.0, 12: 0.5, 14: 0.0}, 14),
        ({10: 0.0, 12: 0.0, 14: 0.02, "float16": 0.0}, None),
        ({10: -0.01, 12: 0.01}, 10),
    ],
)
def test_the_fewest_bits_are_enough_from_there_on(lost, expected):
    assert fewest_bits(lost) == expected


def trained(accuracy):
    return Ends(*(np.broadcast_to(value, 2) for value in (accuracy, 0.5, 0.5)))


def made_up(nearest_16=0.8, random_16=0.95, nearest_14=0.2, random_14=0.95, short=0.945, tiny=0.8):
    exact = trained(0.95)
    ways = []
    for values in ({14: nearest_14, 16: nearest_16}, {14: random_14, 16: random_16}):
        ways.append({form: trained(values.get(form, 0.95)) for form in FORMATS})
    ways[0] |= {form: trained(tiny) for form in ("float8_e4m3fn", "float8_e5m2")}
    ways[1] |= {form: trained(short) for form in FLOATS}
    holds = stochastic_rounding.holds_of(exact, *ways)
    return [np.all(holds[claim]) for claim in written("stochastic-rounding")["claims"]]


@pytest.mark.parametrize(
    ("numbers", "failing"),
    [
        ({}, []),
        ({"random_16": 0.93}, [0, 3]),
        ({"nearest_16": 0.945}, [1]),
        ({"nearest_14": 0.6}, [2]),
        ({"nearest_14": 0.6, "nearest_16": 0.2}, []),
        ({"nearest_14": [0.2, 0.6]}, [2]),
        ({"random_14": 0.93}, [2]),
        ({"random_14": 0.93, "nearest_16": 0.95}, [1, 2, 3]),
        ({"short": 0.9}, [4, 5]),
        ({"tiny": 0.91}, [5]),
    ],
)
def test_a_verdict_follows_from_the_numbers(numbers, failing):
    assert [number for number, holds in enumerate(made_up(**numbers)) if not holds] == failing


def test_a_format_without_a_seed_is_the_librarys_rounding():
    values = tf.constant([0.3, 17.0, 500.0])
    assert rounded(values, "float8_e4m3fn").numpy().tolist() == [0.3125, 16.0, 448.0]
    assert rounded(values, 10).numpy().tolist() == fixed_point(values, 4).numpy().tolist()
    drawn = rounded(tf.fill([100], 17.0), "float8_e4m3fn", tf.constant([0, 0]))
    assert set(drawn.numpy()) == {16.0, 18.0}
