"""How large a tensor of a graph is, and whose buffer it shares."""

from __future__ import annotations

import math

import tensorflow as tf

_SAME_BUFFER = frozenset(
    ["EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient"]
)
"""Operations whose output is their input's buffer."""
_LISTS = ("EmptyTensorList", "TensorListReserve")
_LOOPS = ("While", "StatelessWhile")


def root_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose buffer this one shares."""
    while tensor.op.type in _SAME_BUFFER:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def bytes_of(tensor: tf.Tensor) -> int | None:
    """Its size; None where the graph does not say it."""
    if tensor.dtype == tf.variant:
        return _bytes_of_list(tensor)
    if not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape) * tensor.dtype.size


def _bytes_of_list(tensor: tf.Tensor) -> int | None:
    """Of the values that a loop keeps for its gradient, one for each of its turns."""
    if tensor.op.type not in _LOOPS:
        return None
    made = root_of(tensor.op.inputs[tensor.value_index]).op
    if made.type not in _LISTS:
        return None
    shape = tf.get_static_value(made.inputs[0])
    turns = max((_length(one) for one in tensor.op.inputs), default=0)
    if shape is None or shape.min(initial=1) < 0 or not turns:
        return None
    return int(shape.prod()) * turns * tf.as_dtype(made.get_attr("element_dtype")).size


def _length(tensor: tf.Tensor) -> int:
    """The number of elements of a list, 0 where it is not known."""
    made = root_of(tensor).op
    if made.type == "TensorListFromTensor":
        return made.inputs[0].shape[0] or 0
    if made.type not in _LISTS:
        return 0
    known = tf.get_static_value(made.inputs[1])
    return max(int(known), 0) if known is not None else 0
