"""The mask that Keras stores on the output of a model, by which its losses and metrics leave out what is padding.

_keras_mask    which steps of an output count    absent: the output has none, and neither has its cast
"""

from __future__ import annotations

import tensorflow as tf


def cast_with_mask(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A tensor in another dtype, with the mask that it had: `tf.cast` leaves it behind."""
    cast = tf.cast(tensor, dtype)
    if hasattr(tensor, "_keras_mask"):
        cast._keras_mask = tensor._keras_mask
    return cast
