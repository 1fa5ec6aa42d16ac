"""Steps of a run taken again, with no action to hear of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loops.loop.loop import Loop
from loops.run.rewind.batches import Batches
from loops.support.errors import OutOfData
from loops.support.signals import Deferred
from loops.support.text import amount

Replayed = dict[int, dict[str, np.ndarray]]
"""What each step returned, as scalars, by its number."""


def advance(
    loop: Loop,
    batches: Batches,
    until: int,
    signals: Deferred,
    progress: Callable[[int], object] | None = None,
) -> Replayed:
    """Takes steps as the run did, in calls of as many steps.

    Args:
        loop: Some steps before.
        batches: Its data.
        until: The step to stop after.
        signals: May end it after each call.
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
            raise OutOfData(f"the dataset ended after {steps}, and the run went on to step {until} at least.")
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
