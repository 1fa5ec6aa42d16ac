"""The values of runs that are compared, and how runs are aligned.

The values are the loss, and the largest magnitude of each tensor, unscaled. Runs are aligned by applied updates, or by
steps if the updates of a run cannot be counted: two runs with the same number of updates have trained equally long. A
skipped step moves nothing, so a run that skips is behind at the same step, and sees later batches at the same update.
Batches that moved no weight are left out where runs are aligned by updates. Where they are aligned by steps, the
gradients of skipped steps are left out: their values at a lower scale are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import scaler
from loops.loop.silence import of_applied
from loops.record.steps import Recorded
from loops.support.part_names import columns_of

LOSS = "loss"
"""The name of the series of losses; of a part's it is the beginning of "loss of critic"."""
_ROUNDINGS = 8.0
"""How many roundings of the coarser format two runs may differ by: sums in another order differ by a few."""
_USUAL = "float16"
"""The format assumed of a run that does not record one."""


class Series(NamedTuple):
    """A value over the updates or the steps of a run.

    Attributes:
        number: Int64 [n], the numbers of the updates or steps, ascending.
        values: Float64 [n].
        format: The format it was computed in, or None if unknown.
    """

    number: np.ndarray
    values: np.ndarray
    format: str | None


def is_loss(name: str) -> bool:
    """Whether a series is one of losses. Those of tensors have a kind and a path, such as "weights/dense/kernel"."""
    return name == LOSS or name.startswith(f"{LOSS} of ")


def series_of(run: Recorded, number: np.ndarray) -> dict[str, Series]:
    """The values of a run by name, with gradients divided by their loss scale.

    Args:
        run: The run.
        number: Int64 [steps], the number of each step's update or step; -1 leaves the step out.
    """
    kept = number >= 0
    found = {}
    for part, name in columns_of(run.columns, "loss").items():
        loss = run.column(name)
        taken = kept & ~np.isnan(loss) if part else kept  # Between its turns a part has none.
        found[f"{LOSS} of {part}" if part else LOSS] = Series(number[taken], loss[taken], narrowest(run))
    measured = run.tensors
    if measured is None:
        return found
    at = np.searchsorted(run.step, measured.step).clip(0, len(run.step) - 1)
    there = run.step[at] == measured.step
    kept = there & kept[at]
    applied = kept & ~run.skipped[at]
    number = number[at]
    scale = run.column("loss_scale")[at] if "loss_scale" in run.columns else np.ones(len(at))
    for place, name in enumerate(measured.names):
        values = measured.amax[:, place].astype(np.float64)
        if measured.carries_scale[place]:
            found[name] = Series(number[applied], (values / scale)[applied], measured.formats[place])
        else:
            found[name] = Series(number[kept], values[kept], measured.formats[place])
    return found


def is_float32(run: Recorded) -> bool | None:
    """Whether a run computed in float32 throughout; None if unknown."""
    if isinstance(run.facts.get("policy"), str):
        return run.facts["policy"] == "float32"
    return set(run.tensors.formats) == {"float32"} if run.tensors else None


def tolerance(*runs: Recorded) -> float:
    """The relative difference that rounding may make between runs."""
    return _ROUNDINGS * max(scaler.float_format(narrowest(run) or _USUAL).epsilon for run in runs)


def together(one: Series, other: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers that both series have, and the values of each at these."""
    number, first, second = np.intersect1d(one.number, other.number, assume_unique=True, return_indices=True)
    return number, one.values[first], other.values[second]


def octaves(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """|log2| of the ratio of magnitudes: 0 where both are equal, infinite where one is zero or not finite."""
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.abs(np.log2(np.abs(first)) - np.log2(np.abs(second)))
    found = np.where(np.isnan(found) | ((first < 0) != (second < 0)), np.inf, found)
    return np.where(same, 0.0, found)


def median_octaves(one: Series, other: Series) -> float:
    """The median of the octaves between two series where both have a value; NaN where they never do."""
    _, first, second = together(one, other)
    return float(np.median(octaves(first, second))) if len(first) else np.nan


def narrowest(run: Recorded) -> str | None:
    """The coarsest format that a run computes in, or None if unknown.

    A value in float32 may come from values in that format.
    """
    if run.tensors:
        return max(run.tensors.formats, key=lambda name: scaler.float_format(name).epsilon)
    policy = str(run.facts.get("policy", "")).removeprefix("mixed_")
    return policy if policy in ("float32", "float16", "bfloat16") else None


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
