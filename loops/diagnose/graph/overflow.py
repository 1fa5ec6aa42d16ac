"""Measures an overflow: runs its operation in float32 on the same inputs, and compares the result with the format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

import scaler
from loops.diagnose.graph.whereabouts import Frame

_RENAMED = {"reduction_indices": "axis"}
"""Arguments that have another name in `tf.raw_ops` than in the operation's definition."""
_NARROW = ("float16", "bfloat16")


def operation_in_float32(operation: tf.Operation, output: int, values: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
    """The output of an operation with its 16-bit inputs cast to float32; None if it does not run so.

    Args:
        operation: An operation of a graph.
        output: The index of the output.
        values: The values of the graph's tensors, by name.
    """
    try:
        inputs = [values[one.name] for one in operation.inputs]
        if operation.type == "Cast":
            return inputs[0]
        result = getattr(tf.raw_ops, operation.type)(**_arguments(operation, inputs), **_attributes(operation))
    except (KeyError, AttributeError, TypeError, ValueError, tf.errors.OpError):
        return None
    return result[output] if isinstance(result, (tuple, list)) else result


def _arguments(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> dict:
    inputs = [tf.cast(one, tf.float32) if one.dtype.name in _NARROW else one for one in inputs]
    arguments, place = {}, 0
    for argument in operation.op_def.input_arg:
        many = argument.number_attr or argument.type_list_attr
        count = int(operation.get_attr(argument.number_attr)) if argument.number_attr else 1
        if argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        arguments[_RENAMED.get(argument.name, argument.name)] = inputs[place : place + count] if many else inputs[place]
        place += count
    return arguments


def _attributes(operation: tf.Operation) -> dict:
    counted = {argument.number_attr for argument in operation.op_def.input_arg}
    return {
        attribute.name: operation.get_attr(attribute.name)
        for attribute in operation.op_def.attr
        if attribute.type not in ("type", "list(type)") and attribute.name not in counted
    }


def octaves_over(frame: Frame, amax: float) -> float | None:
    """log2 of the true magnitude over the format's largest value; None if it is unknown, or there is no overflow.

    Args:
        frame: The frame of the non-finite value.
        amax: The largest magnitude of the operation's output in float32.
    """
    try:
        largest = scaler.float_format(frame.dtype).max
    except scaler.InvalidArgument:
        return None
    if not math.isfinite(amax) or amax <= largest:
        return None
    return math.log2(amax) - math.log2(largest)
