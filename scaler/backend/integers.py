"""Variables of integers: int64 in memory, so that they may lie on a GPU, and int32 in checkpoints.

TensorFlow has no int32 variables on GPUs. One on the CPU is read and assigned through the host at each step, and what
XLA compiles for a GPU cannot read it at all. Checkpoints of older versions hold int32, and so do those of today.

_serialize_to_tensors   what a checkpoint writes of an object   absent or other: `_VALUE` is written as int64, and a
                                                                 checkpoint of an older version is refused by TensorFlow
_restore_from_tensors   how it is read                          the same
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_VALUE = "VARIABLE_VALUE"
"""The key under which a checkpoint has the value of a variable."""


def on_any_device(value: Any) -> tf.Tensor:
    """The value with a dtype of which a GPU can have a variable: int64 in place of int32."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value


def saved_as_int32(variable: tf.Variable) -> None:
    """Has checkpoints hold a variable of int64 as int32. A copy of the variable does not know."""
    parts = getattr(variable, "values", (variable,))

    def serialized() -> dict[str, tf.Tensor]:
        return {_VALUE: tf.cast(parts[0], tf.int32)}

    def restored(tensors: dict[str, tf.Tensor]) -> None:
        for part in parts:
            part.assign(tf.cast(tensors[_VALUE], tf.int64))

    object.__setattr__(variable, "_serialize_to_tensors", serialized)
    object.__setattr__(variable, "_restore_from_tensors", restored)
