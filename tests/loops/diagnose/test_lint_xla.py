"""Guards `lint(xla=True)`: it names what XLA cannot compile, with a way out that was tried, and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler
from loops.diagnose.lint.subject import Kind
from loops.observe import lint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unstressed")]

L = keras.layers
LABELS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH = np.ones([4, 4, 4, 3], np.float32), np.zeros([4])


def found(*layers, **arguments):
    policy = keras.DTypePolicy("mixed_float16")
    inside = [kind(dtype=policy) for kind in layers]
    model = keras.Sequential([keras.Input([4, 4, 3]), *inside, L.GlobalAveragePooling2D(dtype="float32")])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD())
    return [one for one in lint(model, optimizer, LABELS, BATCH, **arguments) if one.kind is Kind.XLA]


def bicubic(dtype):
    return L.UpSampling2D(2, interpolation="bicubic", dtype=dtype, name="up")


def test_a_layer_without_a_kernel_is_named_once_with_what_helps():
    (one,) = found(bicubic, L.ReLU, xla=True)
    assert (one.layer, one.is_note) == ("up", False)
    assert one.finding == "XLA cannot compile the forward pass of UpSampling2D in mixed_float16."
    assert "refuses it in float32, too" in one.instead
    assert "__inference" not in one.measured


@keras.saving.register_keras_serializable(package="test")
class InFloat32Alone(L.Layer):
    """Calls Python in 16 bits, which XLA cannot."""

    def call(self, x):
        if x.dtype == tf.float32:
            return tf.sqrt(x + 1.0)
        return tf.ensure_shape(tf.numpy_function(lambda value: np.sqrt(value + 1), [x], x.dtype), x.shape)


def test_float32_is_proposed_where_it_compiles():
    (one,) = found(InFloat32Alone, xla=True)
    assert "dtype='float32'" in one.instead


def test_the_layer_is_named_whose_gradient_another_refuses():
    """XLA makes the gradient of a bilinear resize float32, and ReLU refuses that: each compiles by itself."""
    resize = lambda dtype: L.UpSampling2D(2, interpolation="bilinear", dtype=dtype, name="up")  # noqa: E731
    (one,) = found(lambda dtype: L.Conv2D(4, 3, activation="relu", dtype=dtype), resize, xla=True)
    assert (one.layer, one.finding) == ("up", "XLA cannot compile the backward pass of UpSampling2D in mixed_float16.")
    assert "UpSampling2D(..., dtype='float32')" in one.instead


class FailsBackward(L.Layer):
    def call(self, x):
        @tf.custom_gradient
        def same(x):
            return tf.identity(x), lambda dy: tf.ensure_shape(tf.numpy_function(lambda v: v, [dy], dy.dtype), dy.shape)

        return same(x)


def test_a_backward_pass_is_told_from_a_forward_pass():
    (one,) = found(FailsBackward, xla=True)
    assert "the backward pass of FailsBackward" in one.finding


def test_what_compiles_is_not_named_and_nothing_is_compiled_unasked():
    assert found(L.BatchNormalization, lambda dtype: L.Dropout(0.5, dtype=dtype), xla=True) == []
    assert found(bicubic) == []
