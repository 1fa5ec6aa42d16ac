"""The variable of TensorFlow inside of Keras's, and Keras's in another dtype for a while.

_value    the variable of TensorFlow in one of Keras's    absent: scaler.UnsupportedVersion
_dtype    the dtype that it says it has                   absent: scaler.UnsupportedVersion
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
    """TensorFlow's variable, which on several replicas holds one for each."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@contextlib.contextmanager
def variables_in_float32(variables: Iterable[Any]) -> Iterator[None]:
    """Has variables be float32 copies of themselves: in regularizers and in their gradients, too.

    What is assigned to them meanwhile is lost.

    Args:
        variables: Keras's, floating-point and on one device.

    Raises:
        scaler.UnsupportedVersion: If Keras keeps them in another place than the versions that were tested.
    """
    variables = list(variables)
    if not all(isinstance(vars(one).get("_value"), tf.Variable) and "_dtype" in vars(one) for one in variables):
        raise scaler.UnsupportedVersion(
            f"A variable of {versions()} cannot be made float32 for a while: it keeps its value in another place than "
            "the versions that were tested. Install a version that this package names in its metadata."
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
