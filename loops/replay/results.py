"""The results of a replay."""

from __future__ import annotations

import csv
import dataclasses
import os
from typing import Any

import numpy as np

from loops.replay.intervals import Intervals
from loops.replay.table import table
from loops.support.written.place import as_path, writing

_ARRAYS = ("scales", "skipped")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What one strategy would have done on the recorded steps.

    Up to `may_differ_at` it is what training does. After it a real run has other gradients, and each figure is the
    middle of an interval.

    Attributes:
        strategy: The text that was given, or a description of the object.
        skips: The number of steps whose replayed scale is above their limit.
        skip_rate: Their share of all steps.
        mean_log2_scale: The mean of log2 of the scales.
        final_scale: The scale after the last step.
        flushed: The share of the recorded nonzero gradients that would have been zero at the replayed scale, over the
            steps that have histograms and are not skipped; None without such steps.
        at_floor: The share of steps with the lowest scale that the strategy may choose; None if it has a single scale.
        at_ceiling: The share of steps with the highest scale; None if it has a single scale.
        uncertain: The number of steps for which the trace does not determine whether the replayed scale overflows.
        may_differ_at: The first step that the strategy skips and the recorded run did not, or the reverse, or that is
            uncertain, or whose limit is less than an octave above another scale than the recorded one; None if there is
            none with a step after it. Of several traces the least.
        intervals: Where 90% of the figures of real runs lie; None if `may_differ_at` is, or if too few runs are known.
        highest_skip_rate: The upper end of the interval of `skip_rate`. Without an interval every step after
            `may_differ_at` counts.
        may_stall: Whether a step from `may_differ_at` on is, or may be, skipped where the strategy does not soon lower
            its scale. It moves no weight, so that the next one may be skipped as well: how many follow is unknown.
        runs: The results of each trace, if there are several.
        scales: Float32 [steps], the scale of each step.
        skipped: Bool [steps].
    """

    strategy: str
    skips: int
    skip_rate: float
    mean_log2_scale: float
    final_scale: float
    flushed: float | None
    at_floor: float | None
    at_ceiling: float | None
    uncertain: int
    may_differ_at: int | None
    intervals: Intervals | None
    highest_skip_rate: float
    may_stall: bool
    scales: np.ndarray = dataclasses.field(repr=False, compare=False)
    skipped: np.ndarray = dataclasses.field(repr=False, compare=False)
    runs: tuple[Replayed, ...] = dataclasses.field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All fields but the arrays, for JSON."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        kept = {name: value for name, value in named.items() if name not in _ARRAYS}
        return {
            **kept,
            "intervals": self.intervals and self.intervals.to_dict(),
            "runs": [run.to_dict() for run in self.runs],
        }


@dataclasses.dataclass(frozen=True)
class Replay:
    """Strategies on the same recorded steps.

    Attributes:
        steps: The number of steps in all traces; the number of windows for a run with `accumulate`.
        strategies: The results in the order of the strategies.
        lacking: Why figures after `may_differ_at` have no interval, or one that may be too narrow; or None.
        numbers: Int64 [steps], the number of each step in its trace.
    """

    steps: int
    strategies: tuple[Replayed, ...]
    lacking: str | None
    numbers: np.ndarray = dataclasses.field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All fields but the numbers, as a dict for JSON."""
        rows = [one.to_dict() for one in self.strategies]
        return {"steps": self.steps, "strategies": rows, "lacking": self.lacking}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """A table, if possible no wider than `width` characters, and which of its columns hold."""
        return table(self.strategies, self.lacking, width)


def write_scales(found: Replay, path: str | os.PathLike) -> None:
    """Writes a CSV with the column `step` and a column of scales for each strategy, with the strategy's name.

    Args:
        found: The replay of a single trace.
        path: The file; it is replaced.

    Raises:
        NotWritable: If it cannot be written.
    """
    place = as_path("write_scales", "path", path)
    columns = [one.scales.tolist() for one in found.strategies]
    with writing("--scales", place), place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *(one.strategy for one in found.strategies)])
        writer.writerows(zip(found.numbers.tolist(), *columns, strict=True))
