"""Marks tensors as scaled or unscaled, and walks upstream to find the marks.

In a graph a mark is an identity operation with a special name. The walk finds it anywhere upstream. In eager mode there
is no graph to walk: a mark is an attribute of the tensor, and only that tensor is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.graphs import (
    LOOPS,
    calls_functions,
    captured_from,
    first_argument,
    functions_called,
    is_eager,
)

SCALED = "halfstep_scaled"
UNSCALED = "halfstep_unscaled"
LOSS_SCALE = "halfstep_loss_scale"
READ = "halfstep_scale_read"
_KINDS = (SCALED, UNSCALED, LOSS_SCALE, READ)

# Neither a value nor its derivative passes through these.
_OPAQUE = ("OnesLike", "ZerosLike", "Fill", "StopGradient", "Shape", "Sign")

Node = tuple[tf.Tensor, tuple]
"""A tensor with the functions entered on the way to it, each as an operation and the graph that it calls."""


def mark(tensor: tf.Tensor, kind: str) -> tf.Tensor:
    """Returns the same tensor with a mark."""
    marked = tf.identity(tensor, name=kind)
    if is_eager(marked):
        setattr(marked, _attribute(kind), True)
    return marked


class Mark(NamedTuple):
    """A marked tensor that values come from.

    Attributes:
        tensor: The tensor.
        operation: What made it; the call or the loop, if it was made inside of a function. None in eager mode.
    """

    tensor: tf.Tensor
    operation: Any


Marks = dict[str, list[Mark]]


def marks_upstream(tensors: Iterable[tf.Tensor]) -> Marks:
    """The marks that the values of `tensors` come from, by kind. The search ends at the first mark."""
    found: Marks = {}
    for tensor, calls in _nodes_upstream(tensors, kind_of):
        kind = kind_of(tensor)
        if kind:
            operation = None if is_eager(tensor) else tensor.op
            found.setdefault(kind, []).append(Mark(tensor, calls[0][0] if calls else operation))
    return found


def upstream(tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], Any] | None = None) -> Iterator[tf.Tensor]:
    """Yields `tensors` and all floating-point tensors that their values come from.

    Losses and gradients pass through floating-point values alone. Masks and indices carry neither.

    Args:
        tensors: Where to start.
        ends: Whether the walk ends at a tensor. Default: it ends at a mark.
    """
    return (tensor for tensor, _ in _nodes_upstream(tensors, ends or kind_of))


def _nodes_upstream(tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], Any]) -> Iterator[Node]:
    return (node for node, _ in edges_upstream(tensors, ends))


def edges_upstream(tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], Any]) -> Iterator[tuple[Node, list[Node]]]:
    """As `upstream`: each tensor with the functions entered on the way to it, and the same of what it comes from."""
    return edges_upstream_of([(tensor, ()) for tensor in tensors], ends)


def edges_upstream_of(nodes: Iterable[Node], ends: Callable[[tf.Tensor], Any]) -> Iterator[tuple[Node, list[Node]]]:
    """As `edges_upstream`, from tensors inside of functions, each with the functions entered on the way to it."""
    waiting = list(nodes)
    seen: set[tuple] = set()
    while waiting:
        tensor, calls = waiting.pop()
        if (tensor.ref(), calls) in seen or not tensor.dtype.is_floating:
            continue
        seen.add((tensor.ref(), calls))
        sources = [] if ends(tensor) else list(sources_of(tensor, calls))
        yield (tensor, calls), sources
        waiting += sources


def kind_of(tensor: tf.Tensor) -> str | None:
    """The kind of a tensor's mark, or None."""
    if is_eager(tensor):
        return next((kind for kind in _KINDS if hasattr(tensor, _attribute(kind))), None)
    name = tensor.op.name.rsplit("/", 1)[-1] if tensor.op.type == "Identity" else ""
    return next((kind for kind in _KINDS if name.startswith(kind)), None)


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


def _attribute(kind: str) -> str:
    return f"_{kind}"
