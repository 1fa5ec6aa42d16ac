"""What the judgements of one trace found, for the `update` that ends their step in the same trace."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from scaler.backend.graphs import graphs_around, outermost_function
from scaler.backend.replicas import replica_count
from scaler.outcome.outcome import Cause

_FOUND = "halfstep_found"


def note_skip_in_trace(judge: object, cause: tf.Tensor) -> None:
    """Records the cause that an `apply(update=False)` found, scalar int64.

    Args:
        judge: Whoever counts the step with `skip_in_trace`.
        cause: Of its outcome.
    """
    found = _of_this_trace(judge)
    if found is not None:
        found.append(cause)


def skip_in_trace(judge: object) -> tf.Tensor | None:
    """Whether one of the judgements since the last call in this trace found a reason to skip, scalar bool.

    Returns:
        None if this trace cannot tell: in eager mode, on several replicas, if it holds no judgement, or if one lies in
        a branch, a loop or a function that has ended.
    """
    found = _of_this_trace(judge)
    if not found:
        return None
    causes = list(found)
    found.clear()
    around = list(graphs_around())
    if not all(any(cause.graph is graph for graph in around) for cause in causes):
        return None
    return tf.reduce_any([tf.not_equal(cause, int(Cause.NONE)) for cause in causes])


def _of_this_trace(judge: object) -> list[tf.Tensor] | None:
    graph: Any = outermost_function()
    if graph is None or replica_count() > 1:
        return None
    # Kept by the graph itself: a table of graphs would keep each alive, since a tensor holds its graph.
    if not hasattr(graph, _FOUND):
        setattr(graph, _FOUND, weakref.WeakKeyDictionary())
    return getattr(graph, _FOUND).setdefault(judge, [])
