"""Guards the operations on gradients: what counts as finite, unscaling in float32, clipping, sums of duplicates.

`all_finite` decides whether a step is applied. Its meaning: every value of the dense float32 gradient is finite, and so
is the sum of all squares in float32.
"""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scaler_cases import modes_with

import scaler
from scaler import gradients
from scaler.backend.graphs import has_gpu

F16, BF16 = np.float16, ml_dtypes.bfloat16


def slices(values, indices, rows=4):
    """Rows of a gradient of shape [rows, 2]; `rows` None leaves the dense shape open."""
    values = np.asarray(values)
    shape = None if rows is None else tf.constant([rows, 2])
    return tf.IndexedSlices(tf.constant(np.stack([values, values], 1)), tf.constant(indices, tf.int32), shape)


LISTS = {
    "ordinary": ([np.float32([1, -2, 0])], True),
    "infinity": ([np.float32([1]), np.float32([0, np.inf])], False),
    "minus infinity": ([np.float32([1]), np.float32([0, -np.inf])], False),
    "nan": ([np.float32([np.nan, 1]), np.float32([1])], False),
    "inf - inf does not cancel": ([np.float32([np.inf, -np.inf])], False),
    "float16 infinity": ([F16([np.inf])], False),
    "bfloat16 nan": ([np.array([np.nan], BF16)], False),
    "float16 at its maximum": ([F16([65504, -65504])], True),
    "300 float16 values of 100": ([np.full(300, 100, F16)], True),
    "100000 float16 values at the maximum": ([np.full(100_000, 65504, F16)], True),
    "1e20: its square is not finite in float32": ([np.float32([1e20])], False),
    "1e19: its square is": ([np.float32([1e19])], True),
    "the sum of the squares overflows over variables": ([np.float32([1.5e19]), np.float32([1.5e19])], False),
    "the sum of the squares overflows within one": ([np.float32([1.5e19, 1.5e19])], False),
    "float64 beyond float32": ([np.float64([1e200])], False),
    "bfloat16 1e30": ([np.array([1e30], BF16)], False),
    "None among them": ([None, np.float32([1]), None], True),
    "None beside nan": ([None, np.float32([np.nan])], False),
    "only None": ([None, None], True),
    "no gradient": ([], True),
    "empty tensor": ([np.zeros([0, 3], np.float32)], True),
    "zeros and minus zeros": ([np.float32([0, -0.0])], True),
    "scalar": ([np.float32(3)], True),
    "slices": ([slices(np.float32([1, 2]), [3, 0])], True),
    "slices with nan": ([slices(np.float32([1, np.nan]), [3, 0])], False),
    "slices with nan in a duplicate": ([slices(np.float32([1, np.nan]), [3, 3])], False),
    "float16 duplicates that overflow float16, not float32": ([slices(F16([60000, 60000]), [1, 1])], True),
    "float32 duplicates whose sum overflows": ([slices(np.float32([3e38, 3e38]), [1, 1])], False),
    "float32 duplicates whose sum cancels": ([slices(np.float32([3e38, -3e38]), [1, 1])], True),
    "duplicates whose sum has too large a square": ([slices(np.float32([1e19, 1e19]), [2, 2])], False),
    "the same values at different indices": ([slices(np.float32([1e19 / 2, 1e19 / 2]), [2, 1])], True),
    "slices of no rows": ([slices(np.zeros(0, np.float32), [])], True),
    "slices without a dense shape": ([slices(np.float32([3e38, 3e38]), [1, 1], rows=None)], False),
}


SAME_FOR_XLA = {
    *("ordinary", "infinity", "minus infinity", "float16 at its maximum", "1e19: its square is", "bfloat16 1e30"),
    *("100000 float16 values at the maximum", "None among them", "zeros and minus zeros", "scalar", "slices"),
    *("the sum of the squares overflows within one", "slices with nan", "the same values at different indices"),
}
"""Other values of what its program does for another list."""


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "xla"])
def test_all_finite(jit):
    def decide(lists):
        return {case: scaler.all_finite(values) for case, values in lists.items()}

    lists = {
        case: [tf.constant(v) if isinstance(v, (np.ndarray, np.generic)) else v for v in values]
        for case, (values, _) in LISTS.items()
        if not (jit and case in SAME_FOR_XLA)
    }
    found = (tf.function(decide, jit_compile=True) if jit else decide)(lists)
    assert {(one.dtype, one.shape) for one in found.values()} == {(tf.bool, tf.TensorShape([]))}
    assert {case: bool(one) for case, one in found.items()} == {case: LISTS[case][1] for case in lists}


@pytest.mark.parametrize("wrap", [lambda run: run, tf.function], ids=["eager", "graph"])
def test_slices_of_no_rows_without_a_dense_shape_are_finite(wrap):
    # Not under XLA, where a wrong number of segments would end the whole test process.
    empty = slices(np.zeros(0, np.float32), [], rows=None)
    assert wrap(lambda grad: scaler.all_finite([grad]))(empty)


@given(hnp.arrays(np.float32, 12, elements=st.floats(width=32)))
def test_all_finite_is_the_finiteness_of_the_squared_norm(values):
    exact = np.sum(values.astype(np.float64) ** 2)
    limit = float(np.finfo(np.float32).max)
    got = bool(scaler.all_finite([tf.constant(values[:5]), None, tf.constant(values[5:])]))
    if not np.isfinite(exact) or exact > 1.001 * limit:
        assert not got
    elif exact < 0.999 * limit:
        assert got


@given(
    bits=hnp.arrays(np.uint16, 32),
    exponent=st.integers(-100, 100),
    kind=st.sampled_from([F16, BF16]),
)
def test_unscaling_by_a_power_of_two_is_exact(bits, exponent, kind):
    values = bits.view(kind)
    with np.errstate(invalid="ignore"):
        before = np.abs(values.astype(np.float64))
        exact = values.astype(np.float64) * 2.0**-exponent
    # Kernels flush subnormal float32 numbers to zero, on their way in and on their way out.
    normal = (before >= 2.0**-126) & (np.abs(exact) >= 2.0**-126) & (np.abs(exact) < 2.0**128)
    (got,) = gradients.unscale([tf.constant(values)], tf.constant(2.0**exponent))
    assert got.dtype == tf.float32
    np.testing.assert_array_equal(got.numpy()[normal], exact[normal])


@modes_with(("kind",), eager=[(F16,), (BF16,)], graph=[(BF16,), (np.float32,), (np.float64,)], xla=[(F16,)])
def test_unscaled_gradients_are_float32_or_float64_and_keep_their_structure(execute, kind):
    def run(dense, sparse):
        first, none, third = gradients.unscale([dense, None, sparse], tf.constant(8.0))
        assert none is None
        return first, third

    dense, sparse = execute(run)(np.array([[1, -3]], kind), slices(np.array([8, 16, 8], kind), [3, 0, 3]))
    assert dense.dtype == sparse.values.dtype == (tf.float64 if kind is np.float64 else tf.float32)
    np.testing.assert_array_equal(dense.numpy(), [[0.125, -0.375]])
    np.testing.assert_array_equal(sparse.indices.numpy(), [3, 0, 3])
    np.testing.assert_array_equal(sparse.values.numpy()[:, 0], [2, 2, 0])


def test_unscaling_divides_by_the_scale(execute):
    # As an argument: TensorFlow's optimizer replaces a division by a constant.
    x = np.float32([1, 3, 7, 1e-3, 12345.678])
    (got,) = execute(lambda grad, scale: gradients.unscale([grad], scale))(x, np.float32(3))
    # XLA's division on a GPU is not that of IEEE 754. Powers of two are exact there, too.
    np.testing.assert_array_max_ulp(got.numpy(), x / np.float32(3), maxulp=int(has_gpu()))


def test_unscaling_works_in_float32_so_that_small_gradients_survive(execute):
    # 2^-24 / 2^15 is far below the smallest float16.
    (got,) = execute(lambda grad: gradients.unscale([grad], tf.constant(2.0**15)))(F16([2.0**-24]))
    assert got.numpy()[0] == 2.0**-39


@modes_with(("kind",), eager=[(F16,), (np.float32,)], xla=[(F16,)])
def test_sums_of_duplicates_are_those_of_the_dense_gradient(execute, kind):
    indices = [5, 1, 5, 5, 0, 1, 3]
    sparse = slices(np.array([1, 2, 4, 8, 16, 32, 64], kind), indices, rows=6)
    (got,) = execute(lambda grad: gradients.sum_duplicates([grad]))(sparse)
    assert got.values.dtype == tf.float32
    assert got.values.shape == sparse.values.shape
    np.testing.assert_array_equal(got.values.numpy()[:, 0], [13, 34, 0, 0, 16, 0, 64])
    np.testing.assert_array_equal(got.indices.numpy(), indices)
    np.testing.assert_array_equal(tf.convert_to_tensor(got).numpy()[:, 0], [16, 34, 0, 64, 0, 13])


@given(hnp.arrays(np.int32, 9, elements=st.integers(0, 5)), st.booleans())
def test_squares_of_any_slices_are_those_of_the_dense_gradient(indices, shaped):
    values = np.arange(1, 10, dtype=np.float32)
    grad = slices(values, indices, rows=6 if shaped else None)
    dense = np.bincount(indices, values, 6)
    norm = gradients.squared_norm(gradients.sum_duplicates([grad]))
    assert norm.numpy() == 2 * np.sum(dense**2)


@pytest.mark.parametrize("method", ["apply", "unscale", "optimizer", "per_loss"])
def test_slices_made_by_hand_may_hold_tuples(method):
    def slices(values):
        return tf.IndexedSlices(np.full((3, 2), values, np.float32), (0, 2, 2), (5, 2))

    weight, optimizer = keras.Variable(tf.ones((5, 2))), keras.optimizers.SGD(0.5)
    loss_scaler = scaler.LossScaler(scaler.Static(1024.0))
    loss_scaler.scale(tf.constant(1.0))
    if method == "apply":
        assert loss_scaler.apply(optimizer, [slices(1024.0)], [weight]).finite
    elif method == "unscale":
        optimizer.apply(loss_scaler.unscale([slices(1024.0)]), [weight])
    elif method == "optimizer":
        wrapped = scaler.LossScaleOptimizer(optimizer, scaler.Static(1024.0))
        wrapped.scale_loss(tf.constant(1.0))
        assert wrapped.apply([slices(1024.0)], [weight]).finite
    else:
        losses = scaler.PerLoss({"one": scaler.Static(1024.0)})
        losses.scale({"one": tf.constant(1.0)})
        assert losses.apply(optimizer, {"one": [slices(1024.0)]}, [weight]).finite
    assert weight.numpy()[:, 0].tolist() == [0.5, 1.0, 0.0, 1.0, 1.0]
