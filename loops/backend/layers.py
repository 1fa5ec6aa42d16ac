"""The layers in a model, as often as it is called.

_flatten_layers    Keras's own list of the layers in a layer    absent: they are looked for, seventy times slower


The mask that Keras stores on the output of a model, by which its losses and metrics leave out what is padding.

_keras_mask    which steps of an output count    absent: the output has none, and neither has its cast
"""

from __future__ import annotations

import keras
import tensorflow as tf

import scaler


def layers_now(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A model and the layers in it, also those in its layers, without what Keras adds by itself to name an input."""
    flattened = getattr(model, "_flatten_layers", lambda: scaler.observe.layers_of(model))
    return [layer for layer in flattened() if not isinstance(layer, keras.layers.InputLayer)]


def cast_with_mask(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A tensor in another dtype, with the mask that it had: `tf.cast` leaves it behind."""
    cast = tf.cast(tensor, dtype)
    if hasattr(tensor, "_keras_mask"):
        cast._keras_mask = tensor._keras_mask
    return cast
