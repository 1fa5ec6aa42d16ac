"""Finds the buffers of a forward pass that the backward pass still needs, from the graph alone."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

_SAME_BUFFER = frozenset(
    ["EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient"]
)
"""Operations whose output shares the buffer of their input."""
_LISTS = ("EmptyTensorList", "TensorListReserve")
_LOOPS = ("While", "StatelessWhile")


def root_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that owns the buffer of this one."""
    while tensor.op.type in _SAME_BUFFER:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def bytes_of(tensor: tf.Tensor) -> int | None:
    """The size of a tensor in bytes; None if its static shape is unknown."""
    if tensor.dtype == tf.variant:
        return _bytes_of_list(tensor)
    if not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape) * tensor.dtype.size


def _bytes_of_list(tensor: tf.Tensor) -> int | None:
    """The bytes of a tensor list in which a loop saves one value per iteration for its gradient."""
    if tensor.op.type not in _LOOPS:
        return None
    creator = root_of(tensor.op.inputs[tensor.value_index]).op
    if creator.type not in _LISTS:
        return None
    shape = tf.get_static_value(creator.inputs[0])
    iterations = max((_length(one) for one in tensor.op.inputs), default=0)
    if shape is None or shape.min(initial=1) < 0 or not iterations:
        return None
    return int(shape.prod()) * iterations * tf.as_dtype(creator.get_attr("element_dtype")).size


def _length(tensor: tf.Tensor) -> int:
    """The number of elements of a tensor list; 0 if it is unknown."""
    creator = root_of(tensor).op
    if creator.type == "TensorListFromTensor":
        return creator.inputs[0].shape[0] or 0
    if creator.type not in _LISTS:
        return 0
    known = tf.get_static_value(creator.inputs[1])
    return max(int(known), 0) if known is not None else 0


_THERE_ANYWAY = ("Const", "Placeholder", "ReadVariableOp", "ZerosLike")
_READS = ("ReadVariableOp", "ResourceGather")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor that is saved until the backward pass has used it.

    Attributes:
        node: The name of the operation that created it.
        bytes: Its size in bytes; None if its static shape is unknown.
        copies_weights: Whether it holds only weights, such as weights cast to another dtype.
    """

    node: str
    bytes: int | None
    copies_weights: bool


def saved_buffers(
    graph: tf.Graph, seed: tf.Tensor, batch: Iterable[tf.Tensor], weights: Sequence[tf.Tensor]
) -> list[Buffer]:
    """The buffers that operations before the backward pass create and operations of the backward pass read.

    An operation belongs to the backward pass if it depends on the gradient of the loss, and an output of the graph
    depends on it. Operations that read only the shape of a tensor, that are recomputed from an earlier tensor, or whose
    result is unused therefore save nothing. Variables and the batch stay in memory anyway, and are not counted.

    Args:
        graph: A forward pass, its loss and the gradients, which are its outputs.
        seed: The gradient of the loss, where the backward pass begins.
        batch: The inputs of the graph that hold the batch.
        weights: The handles of the trained variables in the graph.
    """
    backward = _reached({seed.op}) & needed({one.op for one in graph.outputs})
    of_batch = {one.ref() for one in batch}
    fed_by_batch = _reached({one.op for one in batch})
    handles = {one.ref() for one in weights}
    found: dict[object, Buffer] = {}
    for operation in graph.get_operations():
        if operation not in backward:
            continue
        for tensor in operation.inputs:
            if tensor.op in backward or tensor.dtype == tf.resource:
                continue
            root = root_of(tensor)
            key = _key(root)
            if key in found or root.ref() in of_batch or root.op.type in _THERE_ANYWAY:
                continue
            origins = _origins(root.op)
            if origins:  # Without an origin it is a constant.
                copies = root.op not in fed_by_batch and all(
                    one.type in _READS and one.inputs[0].ref() in handles for one in origins
                )
                found[key] = Buffer(root.op.name, bytes_of(root), copies)
    return list(found.values())


def _reached(start: set[tf.Operation]) -> set[tf.Operation]:
    """These operations and all that depend on them."""
    found, waiting = set(start), collections.deque(start)
    while waiting:
        for output in waiting.popleft().outputs:
            for consumer in output.consumers():
                if consumer not in found:
                    found.add(consumer)
                    waiting.append(consumer)
    return found


def needed(end: set[tf.Operation]) -> set[tf.Operation]:
    """These operations and all on which they depend."""
    found, waiting = set(end), list(end)
    while waiting:
        fresh = {tensor.op for tensor in waiting.pop().inputs} - found
        found |= fresh
        waiting += fresh
    return found


def _key(root: tf.Tensor) -> object:
    """The identity of a buffer: casts of one tensor to one dtype share it, since the graph optimizer merges them."""
    if root.op.type != "Cast":
        return root.ref()
    source = root_of(root.op.inputs[0])
    if source.op.type == "ReadVariableOp":
        return ("Cast", source.op.inputs[0].ref(), root.dtype)
    return ("Cast", source.ref(), root.dtype)


def _origins(operation: tf.Operation) -> list[tf.Operation]:
    """The sources of an operation's data: reads of variables, inputs of the graph, random numbers."""
    return [one for one in needed({operation}) if one.type in _READS or (not one.inputs and not _is_constant(one))]


def _is_constant(operation: tf.Operation) -> bool:
    return operation.type == "Const" or any(one.dtype == tf.resource for one in operation.outputs)
