"""Operations, and a layer, that return their input and rescale its gradient in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.layers import carry
from scaler.errors import InvalidArgument
from scaler.gradients import statistics
from scaler.strategies import exact

MEASURED = 3
"""Numbers that `measured_rescale` reports."""


class Rescale(keras.layers.Layer):
    """The identity. `apply`, which is set once the groups are known, rescales its gradient."""

    scales_gradients = True
    """By this `loops.TrainStep` recognises a model that needs its `Layerwise`."""

    def __init__(self, group: str):
        # Without autocast, which would round the outputs to the policy's dtype.
        super().__init__(name=f"rescale_{group}", autocast=False)
        self.supports_masking = True
        self.apply: Callable[[Any], tf.Tensor] = tf.identity

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """`x`, with its mask."""
        # A loss that takes the logits behind an output has its gradient rescaled as well.
        return carry(x, self.apply(x), self.apply)

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """That of `x`."""
        return keras.KerasTensor(x.shape, dtype=x.dtype)


@no_autograph
def rescale(x: tf.types.experimental.TensorLike, factor: float | tf.Tensor) -> tf.Tensor:
    """`x` itself, whose gradient is multiplied by `factor`.

    The product is computed in float32, or in float64 for a float64 gradient, and rounded to the gradient's dtype. For a
    power of two it is exact within the dtype's range. All gradients of what `x` was computed from are then gradients of
    `factor` times the loss.

    Args:
        x: Tensor of a floating dtype and any shape.
        factor: Scalar, a number or tensor.

    Raises:
        InvalidArgument: For another dtype of `x`.
    """
    x = _checked(x)

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda grad: _times(grad, factor)

    return identity(x)


def measured_rescale(
    x: tf.types.experimental.TensorLike, probe: tf.Variable, factor: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """As `rescale`, and reports what it measured of the gradient as the "gradient" of `probe`.

    So what is measured in the backward pass leaves it as a value, in eager mode as in a graph and under XLA, and no
    variable changes on the way. Used several times, reports add up.

    Args:
        x: Tensor of a floating dtype.
        probe: Trainable float32 variable [MEASURED]; its value does not matter. Its gradient is: the largest magnitude
            that came back, infinity if one is not finite; the root mean square, 0 then; the largest magnitude after
            rescaling.
        factor: Called in the backward pass, gives a scalar float32.
    """

    @tf.custom_gradient
    def identity(
        x: tf.Tensor, probe: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        def backward(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            grad, times = tf.convert_to_tensor(grad), factor()
            return _times(grad, times), _measure(grad, times)

        return tf.identity(x), backward

    return identity(_checked(x), tf.convert_to_tensor(probe))


def root_mean_square(values: tf.Tensor, amax: tf.Tensor) -> tf.Tensor:
    """The root mean square of float32 values whose largest magnitude is `amax`; 0 if `amax` is 0 or infinite."""
    usable = tf.logical_and(amax > 0.0, amax < float("inf"))
    unit = tf.maximum(exact.power_of_two_at_most(tf.where(usable, amax, 1.0)), 2.0**-126)
    squares = tf.reduce_sum(tf.square(values / unit))  # Between 1 and 4 times their number: no square is lost.
    count = tf.maximum(tf.cast(tf.size(values), tf.float32), 1.0)
    return tf.where(usable, tf.sqrt(squares / count) * unit, 0.0)


def _measure(grad: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    amax = statistics.amax([grad])
    # Rounding keeps the order: the largest one rescaled is the largest of those rescaled.
    rescaled = tf.cast(_times(tf.cast(amax, grad.dtype), factor), tf.float32)
    return tf.stack([amax, root_mean_square(tf.cast(grad, tf.float32), amax), rescaled])


def _times(grad: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    grad = tf.convert_to_tensor(grad)
    wide = tf.float64 if grad.dtype == tf.float64 else tf.float32
    return tf.cast(tf.cast(grad, wide) * tf.cast(factor, wide), grad.dtype)


def _checked(x: tf.types.experimental.TensorLike) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating:
        raise InvalidArgument(
            f"rescale(x): x has dtype {x.dtype.name}, which has no gradient: expected a floating-point tensor."
        )
    return x
