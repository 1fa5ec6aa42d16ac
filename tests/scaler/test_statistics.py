"""Guards what is measured of a step's gradients for a strategy: amax, the histogram."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scaler_cases import modes

import scaler
from scaler.gradients.statistics import amax, histogram
from scaler.strategies import Needs
from scaler.strategies.base import needs_of, together

EDGES = (2.0**-20, 1.0, 8188.0)


def slices(values, indices=(0, 2)):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices, tf.int64), tf.constant([4, 2], tf.int64))


@modes("eager", "xla")
def test_amax(execute):
    """Of every dtype, sparse, absent, subnormal, or nothing at all."""
    dtypes = ("float16", "bfloat16", "float32", "float64")
    smallest = np.float32(2.0**-149)

    def every(dense, sparse, small, none):
        of_dtypes = [amax([tf.cast(one, dtype) for one in dense]) for dtype in dtypes]
        return of_dtypes, amax([None, sparse, None]), [amax([one]) for one in small], [amax(one) for one in none]

    found, sparse, small, none = execute(every)(
        [np.array([[1.0, -3.5], [0.0, 2.0]]), np.array(-0.25), np.zeros((0, 3))],
        slices([[1.0, -2.0], [9.0, 0.5]]),
        [np.array([0.0, -smallest], np.float32), np.array([2.0**-24], np.float16)],
        [[], [None], [np.zeros((0,), np.float32)], [np.zeros((3,), np.float32)]],
    )
    for one in found:
        assert (one.dtype, one.shape) == (tf.float32, [])
        assert one.numpy() == 3.5
    assert sparse.numpy() == 9.0
    assert [one.numpy() for one in small] == [smallest, 2.0**-24]
    assert [one.numpy() for one in none] == [0.0] * 4


@modes("eager", "xla")
def test_amax_of_anything_not_finite_is_infinity(execute):
    run = execute(lambda *grads: amax(grads))
    for dtype in (np.float16, np.float32):
        for bad in (np.inf, -np.inf, np.nan, -np.nan):
            for grads in itertools.permutations([np.array([1.0, bad, 2.0], dtype), np.array([3.0, 4.0, 5.0], dtype)]):
                assert run(*grads).numpy() == np.inf


@functools.cache
def compiled(function):
    return tf.function(function, jit_compile=True)


VALUES = arrays.arrays(np.float32, 16, elements=st.floats(width=32))


def both(first, second):
    return amax([first, second]), histogram([first, second], EDGES)


@settings(max_examples=50)
@given(VALUES, VALUES)
def test_equal_to_numpy(first, second):
    every = np.concatenate([first, second])
    largest = np.max(np.abs(every)) if np.isfinite(every).all() else np.inf
    magnitude = np.where(np.isnan(every), np.inf, np.abs(every))
    bounds = [-np.inf, *map(np.float32, EDGES), np.inf]
    counts = [((magnitude > low) & (magnitude <= high)).sum() for low, high in itertools.pairwise(bounds)]
    found, counted = compiled(both)(tf.constant(first), tf.constant(second))
    assert found.numpy() == largest
    np.testing.assert_array_equal(counted.numpy(), counts)


@modes("eager", "xla")
def test_a_histogram(execute):
    """It counts values on an edge below it, sums duplicates first, and of nothing it is 0."""

    def every(half, duplicates):
        return histogram([half, None], (1.0, 2.0)), histogram([duplicates], (2.5,)), histogram([None], EDGES)

    half = np.float16([0, -1, 1.5, -2, 2.5, -np.inf, np.nan])
    found, summed, nothing = execute(every)(half, slices([[1.0, 2.0], [3.0, 0.0]], indices=(1, 1)))
    assert found.dtype == tf.int64
    np.testing.assert_array_equal(found.numpy(), [2, 2, 3])
    np.testing.assert_array_equal(summed.numpy(), [3, 1])
    np.testing.assert_array_equal(nothing.numpy(), [0, 0, 0, 0])


def test_needs_are_declared_and_joined():
    assert needs_of(scaler.Dynamic()) == Needs(False, ())
    assert needs_of(scaler.LogNormal()) == Needs(True, ())
    assert needs_of(scaler.Histogram(edge=8.0)) == Needs(False, (8.0,))
    assert needs_of(scaler.Histogram(edge=8.0, dead_band=2.0)) == Needs(False, (2.0, 8.0))
    assert together(Needs(), Needs(True), Needs(False, (1.0,)), Needs(False, (1.0,))) == Needs(True, (1.0,))
    with pytest.raises(scaler.InvalidArgument, match="one event has one histogram"):
        together(Needs(False, (1.0,)), Needs(False, (2.0,)))


@pytest.mark.parametrize("edges", [(2.0, 1.0), (1.0, 1.0), (0.0,), (-1.0,), (np.inf,), (np.nan,), ("1",)])
def test_edges_must_ascend(edges):
    with pytest.raises(scaler.InvalidArgument, match="edges="):
        histogram([tf.constant([1.0])], edges)


def test_a_foreign_declaration_is_refused():
    class Odd(scaler.NoScaling):
        needs = ("amax",)

    with pytest.raises(scaler.InvalidArgument, match="Needs"):
        needs_of(Odd())
