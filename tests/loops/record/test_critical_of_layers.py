"""Guards the critical scale of models: at the scale that a trace names, and at twice it, steps do what it says."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.record.trace.tensors import tensors_of
from loops.record.trace.visit_columns import critical_scales

pytestmark = pytest.mark.slow

L = keras.layers


def dense_layers():
    return [keras.Input([4]), L.Dense(8, activation="relu"), L.Dense(2)], np.float32


def normalized():
    return [keras.Input([4]), L.Dense(8), L.LayerNormalization(), L.Dense(1, dtype="float32")], np.float32


def of_text():
    return [
        keras.Input([6], dtype="int32"),
        L.Embedding(5, 4),
        L.LSTM(4, unroll=True),
        L.Dense(1, dtype="float32"),
    ], np.int32


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
    return [keras.Input([4]), Twice(), L.Dense(1)], np.float32


def measured(build):
    """Of first steps at the scales 1, 2, 4, ... up to the first overflow: the step, scales and largest magnitudes."""
    keras.utils.set_random_seed(0)
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        layers, dtype = build()
        model = keras.Sequential(layers)
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    x = np.random.default_rng(0).integers(0, 5, [256, model.input_shape[-1]]).astype(dtype)
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


@pytest.mark.exhaustive_with("normalized-False", "of_text-False", "used_twice-False")
@pytest.mark.parametrize(
    ("build", "known"), [(dense_layers, True), (normalized, False), (of_text, False), (used_twice, False)]
)
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
