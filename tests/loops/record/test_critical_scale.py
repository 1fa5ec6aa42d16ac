"""Guards the critical scale: what is said of other scales is what casts at those scales do."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

import loops
import scaler
from loops.record.trace.tensors import Tensor, tensors_of
from loops.record.trace.visit_columns import critical_scales, headroom_of

GRADIENT = {name: Tensor("weight_gradients/w", name, True) for name in ("float16", "bfloat16")}
ACTIVATION = Tensor("activations/a", "float16", False)
CASTS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HALF_STEP = 2.0**-11


def cast(values, scale, name):
    """The largest magnitude after a cast, as float64."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.max(np.abs((np.asarray(values) * scale).astype(CASTS[name]).astype(np.float64))))


def by_trying(values, name):
    """The largest power of two at which a cast leaves all of them finite."""
    powers = 2.0 ** np.arange(-160, 320)
    with np.errstate(over="ignore", under="ignore"):
        casts = np.multiply.outer(powers, values).astype(CASTS[name]).astype(np.float64)
    return powers[np.isfinite(casts).all(axis=1)].max()


def found(values, scale, name):
    low, high = critical_scales(np.array([[cast(values, scale, name)]]), np.array([scale]), [GRADIENT[name]])
    return low[0], high[0]


# Float32 numbers: a cast of a float64 to bfloat16 would round twice.
magnitudes = st.floats(2.0**-60, 2.0**60, width=32)
near_powers = st.builds(
    lambda power, halves: 2.0**power * (1 + halves * HALF_STEP / 2), st.integers(-20, 20), st.integers(-5, 5)
)
powers = st.integers(-30, 40).map(lambda power: 2.0**power)


@given(st.lists(magnitudes | near_powers, min_size=1, max_size=3), powers)
@example([65520.0 / 2**10], 2.0**10)
@example([65519.0 / 2**10], 2.0**10)
@example([32752.0], 1.0)
@example([32760.0], 1.0)
@example([2.0**-25], 1.0)
@example([1.5 * 2.0**-24], 1.0)
def test_at_powers_of_two_the_answer_is_that_of_casts(values, scale):
    low, high = found(values, scale, "float16")
    assert low <= by_trying(values, "float16") <= high
    seen = cast(values, scale, "float16")
    # Neighbours below the smallest normal number are as far apart as those above it.
    if np.isfinite(seen) and seen > 2.0**-14:
        assert low == high
    if np.isinf(seen):
        assert (low, high) == (0, scale / 2)


@given(st.lists(magnitudes, min_size=1, max_size=3), st.floats(1e-6, 1e9))
def test_at_other_scales_it_lies_between_the_ends(values, scale):
    low, high = found(values, scale, "float16")
    assert low <= by_trying(values, "float16") <= high
    if np.isfinite(cast(values, scale, "float16")) and cast(values, scale, "float16") >= 2.0**-14:
        assert high <= 2 * low


@given(magnitudes, powers)
def test_of_bfloat16_too(value, scale):
    low, high = found([value], scale, "bfloat16")
    assert low == high == by_trying([value], "bfloat16")


def test_zeros_and_subnormals_say_less_and_infinities_nothing_below():
    amax = np.array([[0.0], [2.0**-24], [np.inf], [np.nan], [1.0]])
    low, high = critical_scales(amax, np.full(5, 2.0**10), [GRADIENT["float16"]])
    assert low.tolist() == [2.0**50, 2.0**49, 0.0, 0.0, 2.0**25]
    assert high.tolist() == [np.inf, 2.0**50, 2.0**9, 2.0**9, 2.0**25]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_no_scale_helps_an_infinite_activation_and_a_finite_one_asks_for_none(bad):
    amax = np.array([[1.0, 60000.0], [1.0, bad]])
    low, high = critical_scales(amax, np.array([4.0, 4.0]), [GRADIENT["float16"], ACTIVATION])
    assert low.tolist() == high.tolist() == [2.0**17, 0.0]
    assert np.isinf(critical_scales(amax[:1, 1:], np.ones(1), [ACTIVATION]).low).all()


def test_headroom_is_that_of_what_the_scale_does_not_touch():
    weights = Tensor("weights/w", "bfloat16", False)
    amax = np.array([[65504.0 / 8, 1.0, 3e4], [0.0, 0.0, 1.0], [np.nan, 1.0, 1.0], [np.inf, 1.0, 1.0]])
    headroom = headroom_of(amax, [ACTIVATION, weights, GRADIENT["float16"]])
    np.testing.assert_equal(headroom, [3.0, np.nan, -np.inf, -np.inf])


def test_an_uncertain_gradient_may_be_a_sum_of_float16_and_a_finite_step_proves_its_scale():
    unsure = Tensor("weight_gradients/w", "float16", True, certain=False)
    low, high = critical_scales(np.array([[2.0**23], [60000.0]]), np.full(2, 2.0**16), [unsure])
    assert low.tolist() == [2.0**16, 2.0**16]
    assert (high >= 2.0**120).all()


L = keras.layers


def dense_layers():
    return [keras.Input([4]), L.Dense(8, activation="relu"), L.Dense(2)]


class Twice(keras.layers.Layer):
    """One Dense layer's kernel in float16 and in float32."""

    def __init__(self):
        super().__init__()
        self.inner = L.Dense(4)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        wide = tf.matmul(tf.cast(x, tf.float32), tf.cast(self.inner.kernel, tf.float32))
        return self.inner(x) + tf.cast(wide, self.compute_dtype)


def used_twice():
    return [keras.Input([4]), Twice(), L.Dense(1)]


def measured(build):
    """Of first steps at the scales 1, 2, 4, ... up to the first overflow: the step, scales and largest magnitudes."""
    keras.utils.set_random_seed(0)
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential(build())
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    x = np.random.default_rng(0).integers(0, 5, [256, model.input_shape[-1]]).astype(np.float32)
    target = np.sum(x, axis=1, keepdims=True).astype(np.float32)
    step = loops.TrainStep(
        model,
        lambda y, prediction: tf.reduce_mean(tf.square(y - tf.cast(prediction, tf.float32))),
        keras.optimizers.SGD(0.0),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(1.0, growth_interval=1, max_scale=2.0**60)),
        probes=scaler.observe.watch(model),
    )
    graph, scales, amax = tf.function(step), [], []
    for _ in range(60):
        seen = graph((tf.constant(x), tf.constant(target)))
        scales.append(float(seen["loss_scale"]))
        amax.append(seen["amax"].numpy())
        if not seen["applied"]:
            break
    return step, np.array(scales), np.stack(amax)


@pytest.mark.slow
@pytest.mark.exhaustive_with("used_twice-False")
@pytest.mark.parametrize(("build", "known"), [(dense_layers, True), (used_twice, False)])
def test_the_interval_holds_what_is_found_by_trying(build, known):
    step, scales, amax = measured(build)
    assert 4 < len(scales) < 60
    low, high = critical_scales(amax, scales, tensors_of(step))
    by_trying = scales[-2]
    assert (low <= by_trying).all()
    assert (by_trying <= high).all()
    assert (low[:-1] >= scales[:-1]).all()
    if known:
        assert low[:-1].tolist() == high[:-1].tolist()
