"""A chart of values over steps, as values: what draws it decides how it looks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from loops.record.run import Recorded
from loops.views.charts.axis import Axis

RUNS = 6
"""The most curves of one kind: no more colours are distinct."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        label: For the legend; "" for none.
        step: Int64 [points], in order.
        values: Float64 [points]; NaN leaves a gap.
        look: The names of its colour and dashes: "blue", "faint", "orange dashed", or "run0" to "run5".
        stairs: Whether each value holds until the next one.
    """

    label: str
    step: np.ndarray
    values: np.ndarray
    look: str
    stairs: bool = False


@dataclasses.dataclass(frozen=True)
class Lane:
    """A strip below a chart with a mark for each of some steps.

    Attributes:
        label: What the marks stand for.
        step: Int64 [marks].
        look: The name of its colour, as of a `Curve`.
    """

    label: str
    step: np.ndarray
    look: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes:
        alt: The same in words, for those who do not see it.
        quantity: What the values are, with their unit: "loss".
        first: The first step of the axis.
        last: The last one.
        y: The axis of the values.
        curves: Drawn in this order.
        lanes: Below the curves, from the top.
        level: The value of a horizontal line, or None.
    """

    alt: str
    quantity: str
    first: int
    last: int
    y: Axis
    curves: Sequence[Curve]
    lanes: Sequence[Lane] = ()
    level: float | None = None


def ends(*runs: Recorded) -> tuple[int, int]:
    """The first and the last step of some runs."""
    return min(int(run.step[0]) for run in runs), max(int(run.step[-1]) for run in runs)


def lanes(*found: Lane) -> list[Lane]:
    """Those that have a mark."""
    return [lane for lane in found if len(lane.step)]
