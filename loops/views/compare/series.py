"""The values of a run that are compared: its loss, and the largest magnitude of each of its tensors, unscaled.

Batches that moved no weight are left out where runs are aligned by updates. Where they are aligned by steps, the
gradients of skipped steps are left out: their values at a lower scale are unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import scaler
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
