"""Variables of integers for a window of micro-batches: int64 in memory, so that they may lie on a GPU; saved as int32.

`scaler/backend/integers.py` says why. `loops` uses public names of `scaler` alone.

_serialize_to_tensors   what a checkpoint writes of an object   absent or other: int64 is written, and a checkpoint of
                                                                 an older version is refused by TensorFlow
_restore_from_tensors   how it is read                          the same
"""

from __future__ import annotations

import tensorflow as tf

_VALUE = "VARIABLE_VALUE"
"""The key under which a checkpoint has the value of a variable."""


def saved_as_int32(variable: tf.Variable) -> tf.Variable:
    """Has checkpoints hold a variable of int64 as int32. A copy of the variable does not know."""
    parts = getattr(variable, "values", (variable,))

    def serialized() -> dict[str, tf.Tensor]:
        return {_VALUE: tf.cast(parts[0], tf.int32)}

    def restored(tensors: dict[str, tf.Tensor]) -> None:
        for part in parts:
            part.assign(tf.cast(tensors[_VALUE], tf.int64))

    object.__setattr__(variable, "_serialize_to_tensors", serialized)
    object.__setattr__(variable, "_restore_from_tensors", restored)
    return variable
