"""Finds where a non-finite value began, from the frames of one step, and how far it lies beyond its format.

The order in which a graph runs does not define a first operation. The search goes back from the failed tensors through
tensors that are not finite, until all inputs of one are finite. Integers and strings are never infinite or NaN, so it
passes through them to the tensors behind them. It never meets an infinity that nothing inherits, such as a mask's.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.operations import CALLS, reached


class Part(enum.Enum):
    """The part of a step to which an operation belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Frame:
    """One floating-point or complex tensor of a step, or an integer one of its batch.

    Attributes:
        name: The tensor's name, such as "dense/MatMul:0".
        kind: The type of its operation, such as "MatMul".
        dtype: The dtype, such as "float16".
        part: The part of the step that computed it.
        layer: The path of the layer that computed it, or None for the loss and the step itself.
        inputs: The names of the floating-point and complex tensors from which it was computed.
        amax: The largest magnitude, with infinity, without NaN; for complex values the larger of the two parts.
        has_nan: Whether it holds a NaN.
        source: "batch" or "variable" if it was not computed but read from there, else None.
        penalty: Whether a regularizer of the layer computed it.
        custom: The name of the function whose custom gradient computed it, or None.
        through: For a non-finite tensor, the names of the tensors behind its other inputs: those of a mask, variables
            that were not finite before the step, and the values that the step assigned to other variables.
        blind: Whether it is not finite and depends on what cannot be measured: a string, a table, an iterator.
    """

    name: str
    kind: str
    dtype: str
    part: Part
    layer: str | None
    inputs: tuple[str, ...]
    amax: float
    has_nan: bool
    source: str | None = None
    penalty: bool = False
    custom: str | None = None
    through: tuple[str, ...] = ()
    blind: bool = False

    @property
    def finite(self) -> bool:
        """Whether all of its values are finite."""
        return not self.has_nan and self.amax != float("inf")

    @property
    def problem(self) -> str:
        """Either "nan", if it holds a NaN, or "inf"."""
        return "nan" if self.has_nan else "inf"


def magnitude(values: Any) -> tuple[float, bool]:
    """The largest magnitude of an array, without NaN, and whether it holds a NaN.

    Args:
        values: A tensor or an array. Of complex numbers both parts count. The magnitude of an empty one is 0.
    """
    numbers = np.asarray(values).reshape(-1)
    if numbers.dtype.kind == "c":
        numbers = np.ascontiguousarray(numbers).view(numbers.real.dtype)
    # NumPy is slow with 16-bit floats, and float32 represents all of their values.
    narrow = numbers.dtype.itemsize <= 2
    sizes = np.abs(numbers.astype(np.float32 if narrow else np.result_type(numbers.dtype, np.float32)))
    return float(np.fmax.reduce(sizes, initial=0.0)), bool(np.isnan(np.max(sizes, initial=0.0)))


def origins(frames: Mapping[str, Frame], failed: Iterable[str]) -> list[Frame]:
    """The frames in which the failure began, the likeliest first.

    Args:
        frames: The frames by name, in the order in which their operations were created.
        failed: The names of the non-finite frames to explain.
    """

    def inherited(name: str) -> list[str]:
        for names in (frames[name].inputs, frames[name].through):
            if lost := [one for one in names if one in frames and not frames[one].finite]:
                return lost
        return []

    began = [
        frames[name] for name in reached((one for one in failed if one in frames), inherited) if not inherited(name)
    ]
    # Inputs come first, then computed tensors. Constants come last, since a mask is infinite on purpose.
    ranks, order = {"batch": 0, "variable": 1}, {name: place for place, name in enumerate(frames)}
    return sorted(began, key=lambda one: (ranks.get(one.source or "", 2 + (one.kind == "Const")), order[one.name]))


def pass_of(frame: Frame, frames: Mapping[str, Frame]) -> str:
    """One of "data", "weights", "forward" and "backward". A cast of data or weights to 16 bits counts to its source."""
    source = frame.source
    if source is None and frame.kind == "Cast":
        sources = [frames[name].source for name in frame.inputs or frame.through if name in frames]
        source = sources[0] if sources else None
    if source == "batch":
        return "data"
    if source == "variable" and frame.part is Part.FORWARD:
        return "weights"
    # A variable that is read after the backward pass holds a sum of gradients.
    return "forward" if frame.part is Part.FORWARD else "backward"


def nearest_layer(frame: Frame, frames: Mapping[str, Frame]) -> str | None:
    """The closest layer from which a tensor outside all layers, or a gradient's forward tensor, was computed."""
    behind = reached(
        [differentiated(frame, frames)], lambda one: [frames[name] for name in one.inputs if name in frames]
    )
    return next((one.layer for one in behind if one.layer is not None), None)


def differentiated(frame: Frame, frames: Mapping[str, Frame]) -> Frame:
    """The forward tensor of a gradient, found by the gradient's name scope; the frame itself if there is none."""
    scope = frame.name.removeprefix("gradient_tape/").rpartition("/")[0]
    return frames.get(f"{scope}:0", frame) if frame.name.startswith("gradient_tape/") else frame


def is_measured(dtype: tf.DType) -> bool:
    """Whether the dtype can hold a NaN or an infinity."""
    return bool(dtype.is_floating or dtype.is_complex)


def computed_from(operation: tf.Operation) -> Iterator[str]:
    """The names of the floating-point and complex tensors that an operation reads.

    For a tensor list, as a loop uses it, these are the tensors and the resource handles that the list is built from.
    """
    for one in reached([operation], lambda one: [tensor.op for tensor in one.inputs if tensor.dtype == tf.variant]):
        for tensor in one.inputs:
            if is_measured(tensor.dtype) or (one is not operation and tensor.dtype == tf.resource):
                yield tensor.name


def sources_of_other_inputs(
    operation: tf.Operation, given: Container[str], variables: Container[str]
) -> tuple[list[str], bool]:
    """The measurable tensors from which an operation's other inputs, such as integers, were computed.

    Args:
        operation: An operation of the graph.
        given: The names of the batch's tensors.
        variables: The names of the variables' handles.

    Returns:
        The names of these tensors, and whether one of them comes from a string, a table, an iterator or the like.
    """

    def measurable(tensor: tf.Tensor) -> bool:
        return is_measured(tensor.dtype) or (tensor.name in given and tensor.dtype.is_integer)

    def behind(one: Any) -> list:
        inputs = [] if measurable(one.deref()) else one.deref().op.inputs
        return [other.ref() for other in inputs if other.name not in variables]

    others = [one.ref() for one in operation.inputs if not is_measured(one.dtype) and one.name not in variables]
    seen = [one.deref() for one in reached(others, behind)]
    blind = any(_opaque(one) for one in seen if not measurable(one))
    return [one.name for one in seen if measurable(one)], blind and operation.type not in CALLS


def _opaque(tensor: tf.Tensor) -> bool:
    """Whether the tensor is a string, a resource or a variant from outside the graph."""
    kind = tensor.op.type
    outside = kind == "Placeholder" or (kind not in CALLS and tensor.op.op_def.is_stateful)
    return outside and tensor.dtype in (tf.string, tf.resource, tf.variant)


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
