"""What a tensor of a graph is computed from, also through functions, branches and loops.

Losses and gradients pass through numbers, lists of tensors and bits. Masks, indices and shapes carry neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from scaler.backend.graphs import (
    LOOPS,
    calls_functions,
    captured_from,
    first_argument,
    functions_called,
    is_eager,
)

# Neither a value nor its derivative passes through these.
_OPAQUE = ("OnesLike", "ZerosLike", "StopGradient", "Shape", "Sign")
# Integers and bits of a gradient pass through these. All other integers are indices, counts and shapes.
_PASS_BITS = (
    *("Cast", "Bitcast", "Identity", "Placeholder", "SerializeTensor", "ParseTensor", "DecodeRaw"),
    *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Pack", "Unpack", "ConcatV2", "Split", "SplitV", "Slice"),
    *("StridedSlice", "AddV2", "AddN", "Sub", "Mul", "Neg", "Sum", "ClipByValue", "Maximum", "Minimum"),
)

Node = tuple[tf.Tensor, tuple]
"""A tensor with the functions entered on the way to it, each as an operation and the graph that it calls."""


def tensors_upstream(tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], Any]) -> Iterator[tf.Tensor]:
    """Yields tensors and all that their values come from.

    Args:
        tensors: Where to start.
        ends: Whether the walk ends at a tensor.
    """
    waiting: list[Node] = [(tensor, ()) for tensor in tensors]
    seen: set[tuple] = set()
    while waiting:
        node = waiting.pop()
        key = node_key(node)
        if key not in seen and carries(node[0]):
            seen.add(key)
            yield node[0]
            waiting += [] if ends(node[0]) else sources_of(*node)


def node_key(node: Node) -> tuple:
    """What a node is known by in a set."""
    return node[0].ref(), node[1]


def carries(tensor: tf.Tensor) -> bool:
    """Whether the value of a gradient may be in a tensor."""
    dtype = tensor.dtype
    if dtype.is_floating or dtype.is_complex or dtype == tf.variant:
        return True
    if is_eager(tensor) or not (dtype.is_integer or dtype == tf.string):
        return False
    return tensor.op.type in _PASS_BITS or calls_functions(tensor.op)


def sources_of(tensor: tf.Tensor, calls: tuple) -> Iterator[Node]:
    """The tensors that a tensor is computed from. `calls` are the functions entered on the way to it."""
    if is_eager(tensor) or tensor.op.type in _OPAQUE:
        return
    op = tensor.op
    if op.type == "Placeholder":
        yield from _arguments(tensor, calls)
        return
    if not calls_functions(op):
        yield from ((source, calls) for source in op.inputs)
        return
    for body in functions_called(op):
        if tensor.value_index < len(body.outputs):
            yield body.outputs[tensor.value_index], (*calls, (op, body))


def parameters(op: Any, index: int) -> Iterator[tuple[Any, tf.Tensor]]:
    """The functions that an operation calls, each with the parameter that receives the input at `index`."""
    for body in functions_called(op):
        if 0 <= index - first_argument(op) < len(body.inputs):
            yield body, body.inputs[index - first_argument(op)]


def _arguments(placeholder: tf.Tensor, calls: tuple) -> Iterator[Node]:
    """The tensors that a function received for a placeholder."""
    if not calls:
        outer = captured_from(placeholder)
        if outer is not None:
            yield outer, ()
        return
    op, body = calls[-1]
    index = next((index for index, own in enumerate(body.inputs) if own is placeholder), None)
    if index is None:
        return
    if first_argument(op) + index < len(op.inputs):
        yield op.inputs[first_argument(op) + index], calls[:-1]
    if op.type in LOOPS and index < len(body.outputs):
        yield body.outputs[index], calls
