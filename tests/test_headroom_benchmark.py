"""Guards the arithmetic of `benchmarks/headroom.py`: what a replay counts as skipped and as flushed to zero."""

import pathlib
import runpy

import numpy as np
import pytest
import tensorflow as tf

import scaler

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "headroom.py"


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(PATH))


@pytest.mark.parametrize("exponent", [-14, 0, 15, 24, 40])
def test_flushed_gradients_are_those_that_a_cast_makes_zero(benchmark, exponent):
    # Powers of two themselves lie on the edges: 2^-25 is still flushed.
    values = (np.float32(2.0) ** np.arange(-60, 20).astype(np.float32)) * np.float32(1.25)
    histogram = np.bincount(np.floor(np.log2(values)).astype(int) + 60, minlength=81)
    scaled = np.minimum(values * np.float32(2.0**exponent), 60000.0).astype(np.float16)
    assert benchmark["flushed"](histogram, float(exponent)) == (scaled == 0).sum()


def test_a_replay_skips_where_the_largest_gradient_overflows(benchmark):
    histogram = np.zeros(81, np.int64)
    histogram[0] = 3  # All of them at 2^-60.
    histogram[60] = 1
    seen = [benchmark["Gradients"](np.float32(1.0), np.float32(size), histogram) for size in (1.0, 200.0, 1.0)]
    found = benchmark["replay"](scaler.Dynamic(2.0**10), seen)
    assert found["skipped"] == [1]
    assert found["log2_scale"] == pytest.approx([(10 + 10 + 9) / 3])
    assert found["flushed"] == [0.75]
    side_by_side = benchmark["replay"](scaler.Headroom(headroom=tf.constant([1, 3])), seen, words=2)
    np.testing.assert_allclose(side_by_side["log2_scale"], [(15 + 14 + 13) / 3, (15 + 12 + 11) / 3])
    np.testing.assert_array_equal(side_by_side["skipped"], [1, 1])


def test_losses_of_a_kind_are_the_same_every_time(benchmark):
    for kind in benchmark["KINDS"]:
        factors = benchmark["factors"](kind, 400)
        np.testing.assert_array_equal(factors, benchmark["factors"](kind, 400))
        assert factors.dtype == np.float32
    assert set(benchmark["factors"]("jumps", 400)) == {1.0, np.float32(2.0**-12)}
