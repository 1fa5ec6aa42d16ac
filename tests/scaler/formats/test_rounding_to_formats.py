"""Guards that rounding to a format gives the bits of `ml_dtypes`, for each of its values and around each tie."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from format_cases import BITS, HOW, assert_same_bits, cast, saturated, values_of

import scaler
from scaler.formats import rounded

WITHOUT_NAN = ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")


def around(name):
    """Each value of a format, each tie of two, ties beyond the largest, and the float32 next to all of them."""
    values = values_of(name)
    step = values[-1] - values[-2]
    ends = values[-1] + step * np.array([0.5, 1.0, 1.5, 2.0, 1000.0])
    with np.errstate(over="ignore"):
        exact = np.concatenate([values, (values[1:] + values[:-1]) / 2, ends, -ends]).astype(np.float32)
        return np.concatenate(
            [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
        )


@pytest.mark.slow_with("float16-xla", "float8_e4m3fn-xla")
@pytest.mark.parametrize(
    ("name", "how"), [*((name, "eager") for name in BITS), ("float16", "xla"), ("float8_e4m3fn", "xla")]
)
def test_every_value_and_every_tie_has_the_bits_of_a_cast(name, how):
    values = np.concatenate([around(name), np.float32([0.0, -0.0, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38])])
    values = values[np.isfinite(values)]
    plain, limited = HOW[how](lambda values: (rounded(values, name), rounded(values, name, saturate=True)))(values)
    assert_same_bits(plain, cast(values, name))
    assert_same_bits(limited, saturated(values, name))


@pytest.mark.parametrize("name", BITS)
@hypothesis.given(patterns=st.binary(min_size=256, max_size=256))
@hypothesis.settings(max_examples=15)
def test_any_value_has_the_bits_of_a_cast(name, patterns):
    values = np.frombuffer(patterns, np.float32)
    wanted = cast(values, name)
    if name in WITHOUT_NAN:
        wanted[~np.isfinite(values)] = np.nan
    assert_same_bits(rounded(values, name), wanted)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("saturate", [False, True])
def test_what_is_not_finite_is_not_hidden(name, saturate):
    payloads = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FA5A5A5], np.uint32).view(np.float32)
    assert np.isnan(rounded(payloads, name, saturate=saturate)).all()
    infinite = rounded([np.inf, -np.inf], name, saturate=saturate).numpy()
    if name in ("float16", "bfloat16", "float8_e5m2"):
        assert infinite.tolist() == [np.inf, -np.inf]
    else:
        assert np.isnan(infinite).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_16_bit_values_stay_16_bits(name, dtype):
    values = values_of(dtype).astype(np.float32)
    found = rounded(tf.cast(values, dtype), name)
    assert found.dtype == tf.as_dtype(dtype)
    with np.errstate(over="ignore"):
        assert_same_bits(tf.cast(found, tf.float32), cast(values, name))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float4_e2m1fn"])
def test_at_random_the_mean_is_the_value_and_a_seed_repeats(name):
    values = np.float32([1.0, 1.3, -2.01, 0.01, -0.01, 3.999])
    values = values if name != "bfloat16" else values * np.float32(1.001)
    many = np.tile(values, (20000, 1))
    found = rounded(many, name, seed=(1, 2)).numpy()
    steps = np.abs(np.concatenate([np.diff(values_of(name)), [0]]))
    at = np.searchsorted(values_of(name), values, side="right") - 1
    low, high = values_of(name)[at], values_of(name)[np.minimum(at + 1, len(values_of(name)) - 1)]
    assert all(set(np.unique(found[:, n])) <= {low[n], high[n]} for n in range(len(values)))
    # Five standard deviations of the mean of as many throws.
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - values), 5 * 0.5 * steps[at] / np.sqrt(20000) + 1e-6)
    assert_same_bits(rounded(many, name, seed=(1, 2)), found)
    assert (rounded(many, name, seed=(1, 3)).numpy() != found).any()
    exact = values_of(name).astype(np.float32)
    assert_same_bits(rounded(exact, name, seed=(0, 0)), exact)
    assert np.signbit(rounded(np.float32([-1e-30, -0.0]), name, seed=(0, 0)).numpy()).all()


def test_gradients_pass_through():
    values = tf.constant([0.3, -1.7, 1e6])
    with tf.GradientTape() as tape:
        tape.watch(values)
        loss = tf.reduce_sum(rounded(values, "float8_e4m3fn", saturate=True) * [1.0, 2.0, 3.0])
    assert tape.gradient(loss, values).numpy().tolist() == [1.0, 2.0, 3.0]


def test_other_formats_and_dtypes_are_refused():
    with pytest.raises(scaler.InvalidArgument, match="format 'float8': expected one of float16, bfloat16"):
        rounded([1.0], "float8")
    with pytest.raises(scaler.InvalidArgument, match="dtype float64: expected float16"):
        rounded(tf.constant(1.0, tf.float64), "float16")
    with pytest.raises(scaler.InvalidArgument, match="saturate=1"):
        rounded([1.0], "float16", saturate=1)
