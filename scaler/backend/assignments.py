"""Where a graph assigns a variable, when its trace ends, and how old an eager tensor is.

captures                     its captured tensors              absent: every operation counts as an assignment
_read_only_resource_inputs   which inputs a call only reads    absent: a call counts as assigning all that it is given
_id                          numbers eager tensors by age      absent: a gradient counts as younger than every loss
_add_scope_exit_callback     runs when a trace ends            absent: sums of scaled gradients by hand are not noticed

Without one of the first three it is unknown more often which scale a gradient carries. A sentence then refuses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from scaler.backend.graphs import captured_from, first_argument, functions_called, graphs_around, is_eager

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape")


def age_of(tensor: Any) -> float:
    """A number that is larger for an eager tensor that was made later. Infinity if TensorFlow does not tell."""
    return float(getattr(tensor, "_id", float("inf")))


def assignments(variable: Any, since: Any = None, until: Any = None) -> list[Any]:
    """The operations that may assign a variable, of the graph that is being traced and those around it.

    Args:
        variable: The variable, or its handle: a tensor of one of these graphs.
        since: The operation of one of these graphs after which to look. Default: all are looked at.
        until: The last one to look at. Default: the last one there is.
    """
    handles = _handles(variable)
    for graph in reversed(graphs_around()):
        captures = getattr(graph, "captures", None)
        if captures is None and graph is tf.compat.v1.get_default_graph():
            return list(_between(since, until))
        handles |= {id(inner) for outer, inner in captures or () if id(outer) in handles}
    return list(dict.fromkeys(op for op, handle in assigned_by(_between(since, until)) if id(handle) in handles))


def assigns(operations: Sequence[Any], variable: Any) -> bool:
    """Whether one of these operations may assign a variable."""
    own = _handles(variable)
    return any(own & _handles(handle) for _, handle in assigned_by(operations))


def assigned_apart_from(graph: Any, spans: Mapping[Any, Sequence[tuple[int, int]]]) -> set[int]:
    """The variables, by the ids of their handles, that a function may assign outside of some spans of operations.

    Args:
        graph: The graph of the function. What it calls counts as well.
        spans: By graph, the places of the first operation of a span and of the one behind its last.
    """
    places: dict[Any, dict] = {}

    def is_assigned(handle: tf.Tensor) -> bool:
        found = [op for op, given in assigned_by(handle.consumers()) if given is handle]
        if found and handle.graph in spans:
            known = places.setdefault(handle.graph, {})
            if not known:
                known.update((op, place) for place, op in enumerate(handle.graph.get_operations()))
            inside = spans[handle.graph]
            found = [op for op in found if not any(first <= known[op] < end for first, end in inside)]
        return any(map(is_assigned_by, found, [handle] * len(found)))

    def is_assigned_by(op: Any, handle: tf.Tensor) -> bool:
        at = [index - first_argument(op) for index, given in enumerate(op.inputs) if given is handle]
        bodies = functions_called(op)
        return not bodies or any(is_assigned(body.inputs[place]) for body in bodies for place in at)

    captured = [(outer, inner) for outer, inner in getattr(graph, "captures", ()) if inner.dtype == tf.resource]
    return set().union(*(_handles(outer) for outer, inner in captured if is_assigned(inner)))


def assigned_since(graph: Any, place: int) -> set[int]:
    """The ids of the handles of all variables that operations of a graph may assign, from one place on.

    What the functions, branches and loops assign that they call counts, too. Of a variable that the graph captured it
    has the handle outside, and those on the way to it.
    """
    operations = graph.get_operations()[place:]
    return set().union(*(_handles(handle) for _, handle in assigned_by(operations)))


def is_function(graph: Any) -> bool:
    """Whether a graph is that of a function, a branch or a loop."""
    return type(graph).__name__.endswith("FuncGraph")


def is_loop_body(graph: Any) -> bool:
    """Whether a graph is the body of a loop."""
    return type(graph).__name__ == "WhileBodyFuncGraph"


def at_end_of_trace(graph: Any, look: Callable[[], None]) -> None:
    """Calls `look` when the trace of a function ends. An error from it is raised by the trace."""
    with contextlib.suppress(AttributeError, RuntimeError):
        graph._add_scope_exit_callback(look)


def _handles(variable: Any) -> set[int]:
    """The handles of a variable on all replicas, or its handle in a graph and those that it was captured from."""
    if not tf.is_tensor(variable) or isinstance(variable, tf.Variable):
        return {id(part.handle) for part in getattr(variable, "values", [variable])}
    handle, found = variable, {id(variable)}
    while handle is not None and not is_eager(handle) and handle.op.type == "Placeholder":
        handle = captured_from(handle)
        found.add(id(handle))
    return found


def _between(since: Any, until: Any) -> Iterator[Any]:
    """The operations after one and up to another, the outermost graph first."""
    begun = since is None
    for graph in reversed(graphs_around()):
        operations: Sequence[Any] = graph.get_operations()
        if not begun and since.graph is graph:
            begun, operations = True, operations[operations.index(since) + 1 :]
        if until is not None and until.graph is graph:
            yield from operations[: operations.index(until) + 1] if begun and until in operations else ()
            return
        yield from operations if begun else ()


def operations_around() -> list[Any]:
    """The operations of the graph that is being traced and those around it, the outermost graph first."""
    return list(_between(None, None))


def assigned_by(operations: Iterable[Any]) -> Iterator[tuple[Any, tf.Tensor]]:
    """The operations that are given a variable and may assign it, each with the variable's handle."""
    for op in operations:
        reads: Sequence[int] | None = None
        for place, tensor in enumerate(op.inputs):
            if tensor.dtype != tf.resource or op.type in _READS:
                continue
            if reads is None:
                known = "_read_only_resource_inputs" in op.node_def.attr
                reads = op.get_attr("_read_only_resource_inputs") if known else ()
            if place not in reads:
                yield op, tensor
