"""Repeats steps of a run without calling any action."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loops.loop.loop import Loop
from loops.run.rewind.batches import Batches
from loops.support.errors import OutOfData
from loops.support.signals import Deferred
from loops.support.text import amount

Replayed = dict[int, dict[str, np.ndarray]]
"""The scalar outputs of each step, by its number."""


def run_to_step(
    loop: Loop,
    batches: Batches,
    until: int,
    signals: Deferred,
    progress: Callable[[int], object] | None = None,
) -> Replayed:
    """Takes steps as the run did, in calls of the same length.

    Args:
        loop: The loop, at an earlier step.
        batches: The loop's batches.
        until: The step to stop after.
        signals: The signals received, which are acted on after each call.
        progress: Called with the number of the last step, after each call.

    Raises:
        OutOfData: If the dataset ends before.
    """
    replayed: Replayed = {}
    while (done := loop.counters.data) < until:
        taken, outputs = _call(loop, batches, until - done)
        for place in range(taken):
            replayed[done + 1 + place] = {name: values[place] for name, values in outputs.items()}
        if not taken:
            steps = amount(done, "step")
            raise OutOfData(f"the dataset ended after {steps}, but the run went on at least to step {until}.")
        signals.act()
        if progress:
            progress(done + taken)
    return replayed


def _call(loop: Loop, batches: Batches, left: int) -> tuple[int, dict[str, np.ndarray]]:
    if not batches.by_one:
        return loop.take(min(loop.longest_call, left))
    batch = batches.next()
    if batch is None:
        return 0, {}
    return 1, {name: value[np.newaxis] for name, value in loop.calls.one(batch).items()}
