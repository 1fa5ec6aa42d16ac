"""The norm of scaled gradients stands for that of unscaled ones only where it is sure to say the same."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from ways import graph

from scaler.gradients.statistics import squared_norms

MEASURE = {
    "eager": squared_norms,
    "graph": graph(squared_norms),
    "xla": graph(squared_norms, jit_compile=True),
}


SHAPES = [(4096,), (64, 128), (3, 3, 64, 64), (4097,), (130, 63)]


def norms(how, values, loss_scale):
    grads = [tf.constant(value) for value in values]
    return MEASURE[how](grads, tf.constant(loss_scale, tf.float32)).numpy()


@pytest.mark.parametrize("how", MEASURE)
def test_extremes(how):
    for values, loss_scale, expected in [
        ([[1e25, 1e25], [0.0, 0.0]], 2.0**60, [2 * (1e25 / 2.0**60) ** 2, 0.0]),  # The scaled squares overflow.
        ([[1e-25, 1e-25], [0.0, 0.0]], 2.0**-60, [2 * (1e-25 * 2.0**60) ** 2, 0.0]),  # The scaled squares underflow.
        ([[3.0, 4.0], [0.0, -1.0]], 1.0, [25.0, 1.0]),
        ([[0.0, -0.0], [0.0, 0.0]], 2.0**126, [0.0, 0.0]),
        ([[1e30, 0.0], [1.0, 0.0]], 1.0, [np.inf, 1.0]),  # Optimizers square.
        ([[1.0, 0.0], [0.0, 0.0]], 2.0**-126, [np.inf, 0.0]),
        ([[2.0**100, 0.0], [0.0, 0.0]], 2.0**100, [1.0, 0.0]),
        ([[1.0, np.inf], [2.0, 0.0]], 2.0, [np.inf, 1.0]),
        ([[1.0, 0.0], [np.nan, 1.0]], 2.0, [0.25, np.nan]),
    ]:
        found = norms(how, [np.float32(value) for value in values], loss_scale)
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=str(values))


@given(magnitude=st.floats(-120, 120), exponent=st.integers(-126, 126), seed=st.integers(0, 2**32 - 1))
def test_is_the_squared_norm_of_the_unscaled_gradients(magnitude, exponent, seed):
    rng = np.random.default_rng(seed)
    values = [np.float32(rng.normal(size=size) * 2.0**magnitude) for size in (7, 3)]
    with np.errstate(over="ignore", under="ignore"):
        unscaled = [np.float64(value) / 2.0**exponent for value in values]
        flushed = [np.where(np.abs(value) < 2.0**-126, 0, value) for value in unscaled]
        expected = np.array([np.square(value).sum() for value in flushed])
    found = norms("xla", values, 2.0**exponent)
    tiny, huge = 2.0**-110, 2.0**127
    if expected.max() < huge:
        # Of what is left below float32's normal numbers, nothing is promised but that it is small.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=max(tiny, 1e-5 * expected.max()))
        assert np.isfinite(found).all()
    elif expected.max() > 2 * huge * 2:
        assert not np.isfinite(found.sum())


@pytest.mark.parametrize("how", MEASURE)
def test_16_bit_gradients_do_not_overflow_by_being_squared(how):
    found = norms(how, [np.float16([65504, 65504]), np.float16([2.0**-24])], 2.0**15)
    np.testing.assert_allclose(found, [2 * (65504 / 2**15) ** 2, 2.0**-78], rtol=1e-6)


@pytest.mark.parametrize("how", MEASURE)
def test_a_power_of_two_changes_no_bit(how):
    values = [np.float32(np.random.default_rng(0).normal(size=1000)), np.float32([1e-3])]
    plain = norms(how, values, 1.0)
    for exponent in (-20, 15, 40):
        scaled = norms(how, [value * np.float32(2.0**exponent) for value in values], 2.0**exponent)
        assert scaled.tobytes() == plain.tobytes()


@pytest.mark.parametrize(
    ("how", "shape"), [*(("eager", shape) for shape in SHAPES), *(("xla", shape) for shape in SHAPES[2:4])]
)
def test_large_tensors_are_summed_with_all_their_values(how, shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    (found,) = norms(how, [values], 1.0)
    np.testing.assert_allclose(found, np.square(np.float64(values)).sum(), rtol=1e-5)
    for place in (0, -1):
        for bad in (np.inf, -np.inf, np.nan):
            broken = values.copy()
            broken.flat[place] = bad
            (found,) = norms(how, [broken], 1.0)
            assert np.isnan(found) == np.isnan(bad)
            assert not np.isfinite(found)
    # Each square is finite, and their sum is not.
    assert norms(how, [np.full(shape, 2.0**59, np.float32)], 2.0**-2) == np.inf


def test_a_scale_that_is_known_to_be_1_divides_nothing_and_finds_the_same():
    traced = graph(lambda values: squared_norms([values], tf.constant(1.0)))
    operations = traced.get_concrete_function(tf.TensorSpec([2])).graph.get_operations()
    assert "RealDiv" not in {op.type for op in operations}
    for values in ([3.0, 4.0], [0.0, -0.0], [1e19, 1e18], [2.0**64, 0], [1e30, 0], [2.0**-60, 0], [1e-30, 0]):
        np.testing.assert_allclose(traced(tf.constant(values)), norms("eager", [np.float32(values)], 1.0), rtol=1e-6)
    for values in ([1.0, np.inf], [np.nan, 0.0]):
        np.testing.assert_array_equal(traced(tf.constant(values)), norms("eager", [np.float32(values)], 1.0))
