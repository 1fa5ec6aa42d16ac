"""One scale for a whole tensor, by its largest magnitude now or in past steps."""

from __future__ import annotations

import tensorflow as tf

from scaler.formats.elements import Element
from scaler.formats.rounding import round_float32

LARGEST_SCALE = 2.0**126
"""Above it the reciprocal is subnormal, and kernels that flush subnormals make it 0."""


def amax_of(values: tf.Tensor) -> tf.Tensor:
    """The largest magnitude, scalar float32; infinity if there is a NaN, 0 of no values."""
    magnitude = tf.abs(values)
    magnitude = tf.where(tf.math.is_nan(magnitude), tf.constant(float("inf")), magnitude)
    return tf.reduce_max(tf.concat([tf.reshape(magnitude, [-1]), [0.0]], axis=0))


def current_scale(amax: tf.Tensor, largest: float) -> tf.Tensor:
    """The scale at which `amax` becomes the largest value: 1 if it is 0 or infinite.

    `compute_scale_from_amax` in NVIDIA/TransformerEngine, transformer_engine/common/recipe/recipe_common.cuh, with a
    ceiling whose reciprocal is still a normal number.
    """
    usable = tf.logical_and(amax > 0.0, tf.math.is_finite(amax))
    return tf.where(usable, tf.minimum(largest / tf.where(usable, amax, 1.0), LARGEST_SCALE), 1.0)


def at_scale(values: tf.Tensor, scale: tf.Tensor, element: Element, seed: tf.Tensor | None = None) -> tf.Tensor:
    """Values multiplied by a scale, rounded with saturation, and multiplied by its reciprocal.

    Args:
        values: Float32, of any shape.
        scale: Scalar float32, or of a shape that broadcasts.
        element: The format.
        seed: Integers [2], by which it rounds at random; None rounds to nearest.
    """
    return round_float32(values * scale, element, True, seed) * (1.0 / scale)
