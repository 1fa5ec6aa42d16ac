"""Guards the two ways to update 16-bit weights without masters, in every mode: what is kept on average, and exactly."""

import functools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scaler_cases import modes_with
from ways import graph

from scaler import InvalidArgument
from scaler.observe import swallowed_share
from scaler.weights.without_masters import add_compensated, round_stochastically

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SIZE = 64


@functools.cache
def rounding(name):
    return graph(lambda values, seed: round_stochastically(values, name, seed), jit_compile=True)


@functools.cache
def numbers_of(kind):
    """All finite numbers of a dtype in ascending order."""
    every = np.arange(2**16, dtype=np.uint16).view(kind).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    if kind is ml_dtypes.bfloat16:
        every = np.unique(np.concatenate([every[np.abs(every) >= 2.0**-119], np.arange(-128, 129) * 2.0**-126]))
    return every


def neighbours(values, kind):
    """The greatest number of a dtype at most each value, and the least at least it."""
    every = numbers_of(kind)
    clipped = np.clip(values, every[0], every[-1])
    return every[np.searchsorted(every, clipped, "right") - 1], every[np.searchsorted(every, clipped, "left")]


VALUES = arrays.arrays(
    np.float32, SIZE // 2, elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
)


@pytest.mark.slow_with("float16")
@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=50)
@given(values=VALUES, seed=st.integers(0, 2**31 - 1))
def test_a_value_becomes_one_of_its_neighbours(name, values, seed):
    found = rounding(name)(tf.constant(values), tf.constant([seed, 0]))
    assert found.dtype == tf.as_dtype(name)
    found = found.numpy().astype(np.float32)
    low, high = neighbours(values, DTYPES[name])
    assert ((found == low) | (found == high)).all()


@modes_with(("names",), eager=[(tuple(DTYPES),)], xla=[(("float16",),)])
def test_at_random_in_every_mode(execute, names):
    """The mean is the value, what is not finite or too large stays so or saturates, and a seed rounds one way."""
    values = np.float32([1 + 2.0**-12, -3.0001, 0.1, 1e-3, 5.0, -700.3, 2.0**-20 * 1.3])
    extremes = np.float32([np.inf, -np.inf, np.nan, 1e38, -70000.0, 65519.0])
    many = np.tile(np.concatenate([values, extremes]), (4000, 1))
    run = execute(lambda v, seed: [round_stochastically(v, name, seed) for name in names])
    for name, rounded, again, other in zip(names, *(run(many, np.int32([seed, 4])) for seed in (3, 3, 5)), strict=True):
        assert rounded.numpy().tobytes() == again.numpy().tobytes()
        assert (rounded.numpy() != other.numpy())[:, 0].any()
        if name == "float16":
            wanted = np.broadcast_to(np.float16([np.inf, -np.inf, np.nan, 65504, -65504, 65504]), [4000, 6])
            np.testing.assert_array_equal(rounded.numpy()[:, 7:], wanted)
        rounded = rounded.numpy().astype(np.float64)[:, :7]
        low, high = neighbours(values, DTYPES[name])
        # Six standard deviations of a mean of 4,000 throws.
        np.testing.assert_array_less(np.abs(rounded.mean(axis=0) - values), 1e-12 + 6 * 0.5 * (high - low) / 4000**0.5)
        assert (rounded[:, 4] == 5.0).all()
        assert len(np.unique(rounded[:, 0])) == 2


def compensated(weights, compensation, update, kind):
    """Kahan's sum in NumPy, whose casts round to nearest."""

    def rounded(x):
        return np.clip(x, -float(ml_dtypes.finfo(kind).max), float(ml_dtypes.finfo(kind).max)).astype(kind)

    old, y = weights.astype(np.float32), update - compensation.astype(np.float32)
    new = rounded(old + y)
    return new, rounded((new.astype(np.float32) - old) - y)


@functools.cache
def adding(jit):
    return graph(add_compensated, jit_compile=jit)


@pytest.mark.parametrize(("name", "jit"), [("float16", False), ("bfloat16", True)])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_compensated_sum_equals_numpys(name, jit, seed):
    rng, kind = np.random.default_rng(seed), DTYPES[name]
    weights = (rng.normal(size=SIZE) * 2.0 ** rng.integers(-10, 13, SIZE)).astype(kind)
    compensation = np.zeros(SIZE, kind)
    for _ in range(5):
        update = (rng.normal(size=SIZE) * 2.0 ** rng.integers(-18, 4, SIZE)).astype(np.float32)
        got = adding(jit)(tf.constant(weights), tf.constant(compensation), tf.constant(update))
        weights, compensation = compensated(weights, compensation, update, kind)
        np.testing.assert_array_equal(got[0].numpy(), weights)
        np.testing.assert_array_equal(got[1].numpy(), compensation)


def test_hundreds_of_updates_that_rounding_to_nearest_swallows():
    update, spacing = np.float32([1e-4, -1e-4, 3e-5]), 2.0**-10

    def once(i, before, compensated, kept, at_random, swallowed):
        nearest = tf.cast(tf.cast(before, tf.float32) + update, tf.float16)
        swallowed += swallowed_share(before, update) / 400
        at_random = round_stochastically(tf.cast(at_random, tf.float32) + update, "float16", tf.stack([i, 7]))
        return i + 1, nearest, *add_compensated(compensated, kept, update), at_random, swallowed

    one, zero = tf.ones([3], tf.float16), tf.zeros([3], tf.float16)
    run = graph(lambda: tf.while_loop(lambda i, *_: i < 400, once, (0, one, one, zero, one, 0.0)))
    _, nearest, compensated, _, at_random, swallowed = run()
    wanted = 1 + 400 * update
    np.testing.assert_array_equal(nearest.numpy().astype(np.float32), 1.0)
    assert abs(swallowed.numpy() - 1.0) < 1e-4
    assert np.abs(compensated.numpy().astype(np.float32) - wanted).max() <= spacing
    # Five standard deviations of 400 throws, each of which moves a weight by one spacing or not at all.
    np.testing.assert_array_less(
        np.abs(at_random.numpy().astype(np.float32) - wanted), 5 * spacing * np.sqrt(400 * np.abs(update) / spacing)
    )


def test_the_share_of_swallowed_updates():
    before, update = np.float16([1, 1, 1, 2]), np.float32([1e-5, 0, 0.5, -1e-5])
    share = graph(swallowed_share)
    assert share(before, update).numpy() == np.float32(2 / 3)
    assert share(before, np.zeros(4, np.float32)).numpy() == 0.0


@pytest.mark.parametrize("dtype", ["float32", "int8", "float17", None])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(InvalidArgument, match="expected bfloat16 or float16"):
        round_stochastically(tf.zeros([2]), dtype, tf.constant([0, 0]))
    with pytest.raises(InvalidArgument, match="expected bfloat16 or float16"):
        add_compensated(tf.zeros([2]), tf.zeros([2]), tf.zeros([2]))
