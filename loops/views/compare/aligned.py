"""Aligns runs by applied updates, or by steps if the updates of a run cannot be counted.

Two runs with the same number of updates have trained equally long. A skipped step moves nothing, so a run that skips is
behind at the same step, and sees later batches at the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loops.loop.unseen import of_applied
from loops.record.steps import Recorded

UPDATE, MICRO_BATCH, STEP = "update", "applied micro-batch", "step"


class Aligned(NamedTuple):
    """How some runs are aligned.

    Attributes:
        by: `UPDATE`; `MICRO_BATCH` if a run sums gradients over windows; or `STEP`.
        why: A sentence that says why they are aligned by step; "" otherwise.
        numbers: For each run, int64 [steps]: the number of each step's batch, counted from 1; -1 for a batch that
            moved no weight.
    """

    by: str
    why: str
    numbers: tuple[np.ndarray, ...]


def aligned(runs: Sequence[Recorded]) -> Aligned:
    """Aligns runs by applied updates if the updates of all can be counted, else by steps."""
    why = next((f"{run.name} {reason}" for run in runs if (reason := _why_uncountable(run))), "")
    if why:
        said = f"They are aligned by step, not by applied update: {why}, so its updates cannot be counted."
        return Aligned(STEP, said, tuple(run.step for run in runs))
    windows = any(not run.attempted.all() for run in runs)
    moved = [of_applied(run.attempted, run.column("applied") == 1) for run in runs]
    return Aligned(MICRO_BATCH if windows else UPDATE, "", tuple(np.where(one, one.cumsum(), -1) for one in moved))


def lost_of(run: Recorded) -> int | None:
    """How many batches a run lost to skipped steps, or None if it does not record it."""
    return None if _why_uncountable(run) else int(of_applied(run.attempted, run.column("applied") == 0).sum())


def window_of(run: Recorded) -> int | None:
    """How many batches a run takes for an update, or None if it does not record it."""
    return None if _why_uncountable(run) or not run.attempted.any() else int(run.step[run.attempted][0])


def step_at(run: Recorded, numbers: np.ndarray, number: int) -> int:
    """The step of a run with a number."""
    return int(run.step[np.argmax(numbers == number)])


def other_batches_at(runs: Sequence[Recorded], numbers: Sequence[np.ndarray]) -> int | None:
    """The first number at which two runs took batches of different steps, or None."""
    steps, others = (run.step[number >= 0] for run, number in zip(runs, numbers, strict=True))
    both = min(len(steps), len(others))
    differs = steps[:both] != others[:both]
    # Without such a number they are aligned by updates, counted from 1, or by steps, which never differ.
    return int(np.argmax(differs)) + 1 if differs.any() else None


def _why_uncountable(run: Recorded) -> str:
    """Why the updates of a run cannot be counted, or ""."""
    if "applied" not in run.columns:
        return "does not record which steps were applied"
    if not np.array_equal(run.step, np.arange(1, len(run) + 1)):
        return "does not record every step from the first on"
    if np.isnan(run.column("applied")[run.attempted]).any():
        return "does not record for every step whether it was applied"
    return ""
