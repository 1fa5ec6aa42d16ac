"""What Keras keeps in a variable, in a layer, and on the output of a model; variables temporarily in another dtype.

_value             the TensorFlow variable in a Keras variable    absent: scaler.UnsupportedVersion
_dtype             the dtype that the Keras variable reports      absent: scaler.UnsupportedVersion
_flatten_layers    Keras's own list of the layers in a layer      absent: they are looked for, seventy times slower
_keras_mask        which steps of an output are no padding, as    absent: the output has none, and neither has its cast
                     losses and metrics have it
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.versions import versions


def native(variable: Any) -> tf.Variable:
    """The TensorFlow variable, which on several replicas has a component for each."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@contextlib.contextmanager
def variables_in_float32(variables: Iterable[Any]) -> Iterator[None]:
    """Within this context, replaces variables by float32 copies, also in regularizers and in their gradients.

    Assignments in the context are lost.

    Args:
        variables: Floating-point Keras variables on one device.

    Raises:
        scaler.UnsupportedVersion: If Keras keeps their values in another place than the tested versions.
    """
    variables = list(variables)
    if not all(isinstance(vars(one).get("_value"), tf.Variable) and "_dtype" in vars(one) for one in variables):
        raise scaler.UnsupportedVersion(
            f"A variable of {versions()} cannot be made float32 temporarily: it keeps its value in another place than "
            "the tested versions. Install a version that this package names in its metadata."
        )
    before = [(one, one._value, one._dtype) for one in variables]
    try:
        for one, value, _ in before:
            one._value = tf.Variable(tf.cast(value, tf.float32), trainable=value.trainable)
            one._dtype = "float32"
        yield
    finally:
        for one, value, dtype in before:
            one._value, one._dtype = value, dtype


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
