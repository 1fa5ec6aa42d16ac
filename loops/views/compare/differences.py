"""Where the loss scales or the decisions of two runs first differ, and of which parts of a composed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from loops.record.run import Recorded
from loops.support.part_names import columns_of


class FirstDifference(NamedTuple):
    """The first step at which a column of two runs differs.

    Attributes:
        step: Its number, or None.
        parts: The parts of a composed step that differ there; none for a step of one loss.
    """

    step: int | None
    parts: tuple[str, ...]


def first_other_scale(run: Recorded, other: Recorded) -> FirstDifference:
    """Where the loss scales of two runs first differ, or those of any part that both have."""
    return _first_of_all(run, other, "loss_scale", lambda recorded, name, part: recorded.columns[name])


def first_other_decision(run: Recorded, other: Recorded) -> FirstDifference:
    """The first step that one run skipped and the other did not; a micro-batch of a window is not skipped."""
    return _first_of_all(run, other, "applied", _skips)


def _skips(run: Recorded, name: str, part: str) -> np.ndarray:
    attempted = run.column(f"{part}/attempted" if part else "attempted") != 0
    return (attempted & (run.columns[name] == 0)).astype(float)


def _first_of_all(run: Recorded, other: Recorded, column: str, values: Callable) -> FirstDifference:
    names = columns_of(run.columns, column)
    found = {
        part: _first((run, other), [values(one, name, part) for one in (run, other)])
        for part, name in names.items()
        if name in other.columns
    }
    at = min((step for step in found.values() if step is not None), default=None)
    return FirstDifference(at, tuple(part for part, step in found.items() if part and step is not None and step == at))


def scales_known(run: Recorded) -> bool:
    """Whether a run records the loss scale of each step, and of each part of a composed step where it was attempted."""
    found = False
    for part, name in columns_of(run.columns, "loss_scale").items():
        known = np.isfinite(run.column(name))
        attempted = run.column(f"{part}/attempted") != 0 if part else np.full(len(run), True)
        if not (known | ~attempted).all():
            return False
        found = True
    return found


def _first(runs: Sequence[Recorded], values: Sequence[np.ndarray]) -> int | None:
    step, first, second = np.intersect1d(runs[0].step, runs[1].step, assume_unique=True, return_indices=True)
    one, two = values[0][first], values[1][second]
    differs = (one != two) & ~(np.isnan(one) & np.isnan(two))
    return int(step[np.argmax(differs)]) if differs.any() else None
