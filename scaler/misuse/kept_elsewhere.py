"""Finds gradients that come out of a queue, a table or another memory that is no variable: perhaps of an earlier step.

What was put there, and when, is not in the graph. What Python keeps behind a `tf.py_function` is not seen at all.
"""

from __future__ import annotations

from scaler.backend.graphs import is_eager
from scaler.misuse.carried import KEEP_UNSCALED
from scaler.misuse.upstream import Upstream

_MEMORIES = {
    "QueueDequeue": "a queue",
    "LookupTableFind": "a table",
    "StackPop": "a stack",
    "BarrierTakeMany": "a barrier",
    "Unstage": "a staging area",
    "MapUnstage": "a staging area",
    "OrderedMapUnstage": "a staging area",
    "ResourceAccumulatorTakeGradient": "an accumulator",
    "AccumulatorTakeGradient": "an accumulator",
}
"""How the types of operations begin that give out what was put into a memory."""


def kept_elsewhere(method: str, upstream: Upstream) -> str | None:
    """Returns a warning if a gradient comes out of such a memory, and from no loss in this graph, else None.

    A forward pass may look up values in a table, too: its gradients come from a loss.

    Args:
        method: Who asks.
        upstream: What scaled gradients come from.
    """
    if _memory(upstream) is None:
        return None
    alone = (upstream.of([value]) for value in upstream.values)
    memory = next(filter(None, (_memory(one) for one in alone if not one.marks)), None)
    if memory is None:
        return None
    return (
        f"{method}(grads): a gradient comes out of {memory}, and nothing tells which loss it belongs to. The scale of "
        f"the last loss divides it, and it may carry that of an earlier step. {KEEP_UNSCALED}"
    )


def _memory(upstream: Upstream) -> str | None:
    types = {tensor.op.type for (tensor, _), _ in upstream.edges if not is_eager(tensor)}
    return next((name for one in types for begin, name in _MEMORIES.items() if one.startswith(begin)), None)
