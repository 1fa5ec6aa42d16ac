"""Where the loss scales or the decisions of two runs first differ, and of which parts of a composed step."""

from __future__ import annotations

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


def first_difference(run: Recorded, other: Recorded, column: str) -> FirstDifference:
    """Where a column of two runs first differs, or that of any part that both have.

    Args:
        run: A run.
        other: The run to compare it with.
        column: The name that a step of one loss gives it, such as "loss_scale".
    """
    names = columns_of(run.columns, column)
    found = {part: _first(run, other, name) for part, name in names.items() if name in other.columns}
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


def _first(run: Recorded, other: Recorded, name: str) -> int | None:
    step, first, second = np.intersect1d(run.step, other.step, assume_unique=True, return_indices=True)
    one, two = run.columns[name][first], other.columns[name][second]
    differs = (one != two) & ~(np.isnan(one) & np.isnan(two))
    return int(step[np.argmax(differs)]) if differs.any() else None
