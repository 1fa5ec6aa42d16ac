"""Variables of integers: int64 in memory, so that they may lie on a GPU, and int32 in checkpoints.

TensorFlow has no int32 variables on GPUs. One on the CPU is read and assigned through the host at each step, and what
XLA compiles for a GPU cannot read it at all. Checkpoints of older versions hold int32, and so do those of today.

_serialize_to_tensors          what a checkpoint writes of an object   absent or other: int64 is written, and TensorFlow
                                                                        refuses checkpoints of older versions
_restore_from_tensors          how it is read                          the same
_export_to_saved_model_graph   the copy in a SavedModel                absent: TensorFlow refuses to load a SavedModel
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_VALUE = "VARIABLE_VALUE"
"""The key under which a checkpoint has the value of a variable."""


def on_any_device(value: Any) -> tf.Tensor:
    """The value with a dtype of which a GPU can have a variable: int64 in place of int32."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value


def saved_as_int32(variable: tf.Variable) -> tf.Variable:
    """Has checkpoints hold an int64 variable as int32, as they did when it was one. A copy of it does not know.

    Args:
        variable: TensorFlow's, of int64, with values that int32 can hold.

    Returns:
        The variable.
    """
    parts, exports = getattr(variable, "values", (variable,)), _Exports()

    def serialized() -> dict[str, tf.Tensor]:
        return {_VALUE: tf.identity(parts[0]) if exports.ends() else tf.cast(parts[0], tf.int32)}

    def restored(tensors: dict[str, tf.Tensor]) -> None:
        for part in parts:
            part.assign(tf.cast(tensors[_VALUE], tf.int64))

    for one in (variable, *parts):
        object.__setattr__(one, _SAVED, tf.int32)
    object.__setattr__(variable, "_serialize_to_tensors", serialized)
    object.__setattr__(variable, "_restore_from_tensors", restored)
    export = getattr(variable, "_export_to_saved_model_graph", None)
    if export is not None:
        object.__setattr__(variable, "_export_to_saved_model_graph", exports.begin_with(variable, export))
    return variable


def saved_dtype(variable: Any) -> tf.DType:
    """The dtype that a checkpoint holds of a variable."""
    return getattr(variable, _SAVED, variable.dtype)


_SAVED = "halfstep_saved"


class _Exports:
    """Whether a SavedModel is being made, which asks for a copy of the variable first and then for its value.

    What loads it knows nothing of int32: the value has to have the dtype of the copy.
    """

    def __init__(self) -> None:
        self._copy: Callable[[], Any] = lambda: None

    def begin_with(self, variable: tf.Variable, export: Callable) -> Callable:
        def exported(object_map: dict, *arguments: Any, **named: Any) -> Any:
            made = export(object_map, *arguments, **named)
            # After an export that failed the copy is gone, and a checkpoint is none.
            self._copy = weakref.ref(object_map[variable])
            return made

        return exported

    def ends(self) -> bool:
        """Whether the value that is asked for now belongs to a SavedModel."""
        copy, self._copy = self._copy(), lambda: None
        return copy is not None
