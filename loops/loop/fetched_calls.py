"""Calls over batches that a thread fetches: as many as there are of one shape are stacked, and taken in the graph.

A source of many shapes has its step traced for any, see `Shapes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from loops.loop.arrays import tensors_of
from loops.loop.call_result import CallResult, joined
from loops.loop.fetching import Fetching

if TYPE_CHECKING:
    from loops.loop.calls import StepCalls


def take_fetched(calls: StepCalls, fetching: Fetching, limit: int) -> CallResult:
    """Takes up to `limit` steps, in as many stacks as their shapes and their size require.

    Fewer are taken before an error of the source, which is raised where the next batch is asked for.
    """
    parts: list[CallResult] = []
    while (left := limit - sum(part.steps for part in parts)) > 0:
        batches = fetching.take(left if calls.in_graph else 1)
        if not batches:
            break
        before = calls.taken
        fetching.shapes.meet(batches[0])
        calls.relax(batches[0], fetching.shapes.common)
        try:
            one = calls.of_stack(batches) if calls.in_graph else calls.of_one(tensors_of(*batches))
        except tf.errors.OpError:
            # As with a dataset: the batch whose step failed is taken, and those after it are not.
            fetching.drop(min(calls.taken - before + 1, len(batches)))
            raise
        fetching.drop(len(batches))
        parts.append(one)
    return joined(parts) if parts else calls.of_none()
