"""Which buffers of a forward pass the backward pass still needs: a graph is walked, and nothing is run."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

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


_THERE_ANYWAY = ("Const", "Placeholder", "ReadVariableOp", "ZerosLike")
_READS = ("ReadVariableOp", "ResourceGather")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One tensor that is held until the backward pass has used it.

    Attributes:
        node: The name of the operation that made it.
        bytes: Its size; None where the graph does not say it.
        copies_weights: Whether it holds nothing but weights: in another dtype, say.
    """

    node: str
    bytes: int | None
    copies_weights: bool


def kept_buffers(
    graph: tf.Graph, seed: tf.Tensor, batch: Iterable[tf.Tensor], weights: Sequence[tf.Tensor]
) -> list[Buffer]:
    """The buffers that operations before the backward pass make and operations of the backward pass read.

    An operation is of the backward pass if it depends on the gradient of the loss, and an output of the graph on it. So
    what reads only the shape of a tensor does not keep it, and neither does what is computed again from an earlier
    tensor, or for nothing. Variables and the batch are there anyway, and are not counted.

    Args:
        graph: A forward pass, its loss and the gradients, which are its outputs.
        seed: The gradient of the loss, from which the backward pass begins.
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
            if origins:  # Without one it is a constant.
                copies = root.op not in fed_by_batch and all(
                    one.type in _READS and one.inputs[0].ref() in handles for one in origins
                )
                found[key] = Buffer(root.op.name, bytes_of(root), copies)
    return list(found.values())


def _reached(start: set[tf.Operation]) -> set[tf.Operation]:
    """The operations that depend on these, with them."""
    found, waiting = set(start), collections.deque(start)
    while waiting:
        for output in waiting.popleft().outputs:
            for consumer in output.consumers():
                if consumer not in found:
                    found.add(consumer)
                    waiting.append(consumer)
    return found


def needed(end: set[tf.Operation]) -> set[tf.Operation]:
    """The operations on which these depend, with them."""
    found, waiting = set(end), list(end)
    while waiting:
        fresh = {tensor.op for tensor in waiting.pop().inputs} - found
        found |= fresh
        waiting += fresh
    return found


def _key(root: tf.Tensor) -> object:
    """The same for casts of one tensor to one dtype, which TensorFlow's graph optimizer makes one."""
    if root.op.type != "Cast":
        return root.ref()
    source = root_of(root.op.inputs[0])
    if source.op.type == "ReadVariableOp":
        return ("Cast", source.op.inputs[0].ref(), root.dtype)
    return ("Cast", source.ref(), root.dtype)


def _origins(operation: tf.Operation) -> list[tf.Operation]:
    """Where the data of an operation comes from: reads of variables, inputs of the graph, random numbers."""
    return [one for one in needed({operation}) if one.type in _READS or (not one.inputs and not _is_constant(one))]


def _is_constant(operation: tf.Operation) -> bool:
    return operation.type == "Const" or any(one.dtype == tf.resource for one in operation.outputs)
