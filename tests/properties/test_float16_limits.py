"""Guards, for any gradient and scale, what float16 makes of a scaled gradient and what comes back from it.

In limits: a magnitude of 65520 or more becomes infinite, 2^-25 or less becomes zero, 2^-14 or more keeps 11 bits.
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import scaler

COUNT = 16
exponents = st.integers(-100, 100)
NORMALS = np.arange(0x0400, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
SIGNS = np.resize([1, -1], COUNT)
# Magnitudes of the scaled gradient, from far below the smallest float16 to far above the largest.
magnitudes = st.one_of(
    st.floats(2.0**-30, 2.0**20, width=32),
    st.floats(2.0**-26, 2.0**-13, width=32),
    st.floats(65440, 65600, width=32),
    st.sampled_from([2.0**-25, 2.0**-24, 2.0**-14, 65504.0, 65520.0]),
)


def through_float16(gradient, loss_scale):
    """Scaled, cast to float16 as a backward pass would hold it, and unscaled."""
    scaled = tf.cast(tf.constant(gradient) * tf.constant(np.float32(loss_scale)), tf.float16)
    (back,) = scaler.LossScaler(scaler.Static(loss_scale)).unscale([scaled])
    assert back.dtype == tf.float32
    return scaled.numpy(), back.numpy()


@settings(max_examples=20)
@given(exponents)
def test_values_of_float16_precision_come_back_bit_for_bit(exponent):
    scaled = np.concatenate([NORMALS, -NORMALS])
    gradient = np.ldexp(scaled, -exponent)
    held, back = through_float16(gradient, 2.0**exponent)
    np.testing.assert_array_equal(held.astype(np.float32), scaled)
    assert back.tobytes() == gradient.tobytes()


@settings(max_examples=50)
@given(hnp.arrays(np.float32, COUNT, elements=st.floats(2.0**-14, 65504, width=32)), exponents)
def test_any_value_in_range_comes_back_within_half_a_step(scaled, exponent):
    gradient = np.ldexp(scaled * SIGNS, -exponent).astype(np.float32)
    _, back = through_float16(gradient, 2.0**exponent)
    error = np.abs(back.astype(np.float64) - gradient) / np.abs(gradient)
    assert error.max() <= 2.0**-11


@settings(max_examples=50)
@given(hnp.arrays(np.float32, COUNT, elements=st.floats(2.0**-13, 65000, width=32)), st.floats(0.125, 5000, width=32))
def test_any_scale_costs_a_few_float32_roundings_more(scaled, loss_scale):
    gradient = scaled / np.float32(loss_scale)
    _, back = through_float16(gradient, loss_scale)
    error = np.abs(back.astype(np.float64) - gradient) / gradient
    assert error.max() <= 2.0**-11 + 4 * 2.0**-24


@pytest.mark.slow
@settings(max_examples=30)
@given(hnp.arrays(np.float32, COUNT, elements=magnitudes), exponents)
def test_too_small_is_zero_too_large_is_infinite_and_skipped(scaled, exponent):
    gradient = np.ldexp(scaled * SIGNS, -exponent).astype(np.float32)
    held, back = through_float16(gradient, 2.0**exponent)
    half = scaler.float_format("float16")
    np.testing.assert_array_equal(held == 0, scaled <= 2.0**-25)
    np.testing.assert_array_equal(back == 0, half.underflows(scaled).numpy())
    np.testing.assert_array_equal(np.isinf(held), scaled >= 65520)
    np.testing.assert_array_equal(np.isinf(back), half.overflows(scaled).numpy())

    weights = tf.Variable(tf.zeros([COUNT]))
    loss_scaler = scaler.LossScaler(scaler.Static(2.0**exponent))
    assert loss_scaler.loss_scale == 2.0**exponent
    outcome = loss_scaler.apply(
        lambda grads, variables: variables[0].assign_sub(grads[0]), [tf.constant(held)], [weights]
    )
    with np.errstate(over="ignore"):
        finite = np.isfinite(np.sum(np.square(back.astype(np.float32))))
    assert finite <= np.isfinite(held).all()
    assert bool(outcome.finite) == finite
    np.testing.assert_array_equal(weights.numpy(), -back if finite else np.zeros(COUNT))


@pytest.mark.slow
@settings(max_examples=8)
@given(hnp.arrays(np.float16, COUNT, elements=st.floats(2.0**-5, 60000, width=16)), st.sampled_from([2, 5, 12]))
def test_masters_keep_updates_that_float16_loses(size, steps):
    weight = size * SIGNS.astype(np.float16)
    update = np.float32(weight) * np.float32(2.0**-12)
    variable = tf.Variable(weight)
    masters, loss_scaler = scaler.MasterWeights([variable]), scaler.LossScaler(scaler.NoScaling())
    alone = weight
    for _ in range(steps):
        loss_scaler.apply(lambda grads, variables: variables[0].assign_add(grads[0]), [tf.constant(update)], masters)
        alone = np.float16(np.float32(alone) + update)
    np.testing.assert_array_equal(alone, weight)
    exact = np.float64(weight) * (1 + steps * 2.0**-12)
    np.testing.assert_allclose(masters.weights[0].numpy(), exact, rtol=1e-6)
    with np.errstate(over="ignore"):
        rounded = np.float16(masters.weights[0].numpy())
    np.testing.assert_array_equal(variable.numpy(), np.clip(rounded, np.float16(-65504), np.float16(65504)))
