"""Marks tensors as scaled or unscaled, and walks upstream to find the marks.

In a graph a mark is an identity operation with a special name. The walk finds it anywhere upstream. In eager mode there
is no graph to walk: a mark is an attribute of the tensor, and only that tensor is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.graphs import (
    BRANCHES,
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
_STOP = "StopGradient"
_OPAQUE = ("OnesLike", "ZerosLike", "Fill", _STOP, "Shape", "Sign")
# Integers and bits of a gradient pass through these. All other integers are indices, counts and shapes.
_PASS_BITS = (
    *("Cast", "Bitcast", "Identity", "Placeholder", "SerializeTensor", "ParseTensor", "DecodeRaw"),
    *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Pack", "Unpack", "ConcatV2", "Split", "SplitV", "Slice"),
    *("StridedSlice", "AddV2", "AddN", "Sub", "Mul", "Neg", "Sum", "ClipByValue", "Maximum", "Minimum"),
)

Node = tuple[tf.Tensor, tuple]
"""A tensor with the functions entered on the way to it, each as an operation and the graph that it calls."""
Edge = tuple[Node, list[Node]]
"""A tensor, and what it comes from."""


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


class Marks(dict[str, list[Mark]]):
    """Marks by their kind.

    Attributes:
        marked: The keys of the nodes that come from one. Empty where nobody asked.
    """

    marked: frozenset[tuple] | set[tuple] = frozenset()


def marks_upstream(tensors: Iterable[tf.Tensor]) -> Marks:
    """The marks that the values of `tensors` come from, by kind. The search ends at the first mark."""
    return _marks_in(edges_upstream(tensors, kind_of))


def marks_of_gradients(values: Sequence[tf.Tensor]) -> Marks:
    """As `marks_upstream`, also behind a `tf.stop_gradient` of a gradient."""
    edges = edges_of_gradients(values)
    found = _marks_in(edges)
    found.marked = _marked(edges)
    return found


def _marks_in(edges: Iterable[Edge]) -> Marks:
    found = Marks()
    for (tensor, calls), _ in edges:
        kind = kind_of(tensor)
        if kind:
            operation = None if is_eager(tensor) else tensor.op
            found.setdefault(kind, []).append(Mark(tensor, calls[0][0] if calls else operation))
    return found


def upstream(tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], Any] | None = None) -> Iterator[tf.Tensor]:
    """Yields `tensors` and all that their values come from.

    Losses and gradients pass through numbers, lists of tensors and bits. Masks, indices and shapes carry neither.

    Args:
        tensors: Where to start.
        ends: Whether the walk ends at a tensor. Default: it ends at a mark.
    """
    return (tensor for (tensor, _), _ in edges_upstream(tensors, ends or kind_of))


def edges_upstream(tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], Any]) -> Iterator[Edge]:
    """As `upstream`: each tensor with the functions entered on the way to it, and the same of what it comes from."""
    return edges_upstream_of([(tensor, ()) for tensor in tensors], ends)


def edges_upstream_of(
    nodes: Iterable[Node], ends: Callable[[tf.Tensor], Any], behind_stops: bool = False
) -> Iterator[Edge]:
    """As `edges_upstream`, from tensors inside of functions, each with the functions entered on the way to it."""
    waiting = list(nodes)
    seen: set[tuple] = set()
    while waiting:
        tensor, calls = waiting.pop()
        if (tensor.ref(), calls) in seen or not _carries(tensor):
            continue
        seen.add((tensor.ref(), calls))
        if behind_stops and _stops(tensor):
            sources = [(tensor.op.inputs[0], calls)]
        else:
            sources = [] if ends(tensor) else list(sources_of(tensor, calls))
        yield (tensor, calls), sources
        waiting += sources


def edges_of_gradients(values: Sequence[tf.Tensor]) -> list[Edge]:
    """As `edges_upstream`, up to the marks, and behind a `tf.stop_gradient` for gradients that have no mark before it.

    In a forward pass the scale of another step may stand behind one, in the weight of a loss. It is not carried.
    """
    edges = list(edges_upstream(values, kind_of))
    if any(_stops(tensor) for (tensor, _), _ in edges):
        marked = _marked(edges)
        without = [(value, ()) for value in values if node_key((value, ())) not in marked]
        edges += edges_upstream_of(without, kind_of, behind_stops=True)
    return edges


def _marked(edges: Iterable[Edge]) -> set[tuple]:
    """The keys of all nodes that come from a mark, and of the marks."""
    users: dict[tuple, list[tuple]] = {}
    waiting = []
    for node, sources in edges:
        for source in sources:
            users.setdefault(node_key(source), []).append(node_key(node))
        waiting += [node_key(node)] if kind_of(node[0]) else []
    found = set(waiting)
    while waiting:
        new = [user for user in users.get(waiting.pop(), ()) if user not in found]
        found.update(new)
        waiting += new
    return found


def node_key(node: Node) -> tuple:
    """What a node is known by in a set."""
    return node[0].ref(), node[1]


def _carries(tensor: tf.Tensor) -> bool:
    """Whether the value of a gradient may be in a tensor."""
    dtype = tensor.dtype
    if dtype.is_floating or dtype.is_complex or dtype == tf.variant:
        return True
    if is_eager(tensor) or not (dtype.is_integer or dtype == tf.string):
        return False
    return tensor.op.type in _PASS_BITS or calls_functions(tensor.op)


def _stops(tensor: tf.Tensor) -> bool:
    return not is_eager(tensor) and tensor.op.type == _STOP


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


def choices_of(tensor: tf.Tensor, calls: tuple) -> list[Node]:
    """What the branches give of which a tensor is one. Empty if no branch gives it."""
    return [] if is_eager(tensor) or tensor.op.type not in BRANCHES else list(sources_of(tensor, calls))


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
