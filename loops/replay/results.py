"""The results of a replay."""

from __future__ import annotations

import csv
import dataclasses
import os
from typing import Any

import numpy as np

from loops.support.text import columns
from loops.support.written.place import as_path, writing


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What one strategy would have done on the recorded steps.

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
    scales: np.ndarray = dataclasses.field(repr=False, compare=False)
    skipped: np.ndarray = dataclasses.field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All fields but the arrays, for JSON."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if name not in ("scales", "skipped")}


@dataclasses.dataclass(frozen=True)
class Replay:
    """Strategies on the same recorded steps.

    Attributes:
        steps: The number of steps in all traces; the number of windows for a run with `accumulate`.
        strategies: The results in the order of the strategies.
        numbers: Int64 [steps], the number of each step in its trace.
    """

    steps: int
    strategies: tuple[Replayed, ...]
    numbers: np.ndarray = dataclasses.field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """`steps` and `strategies` as a dict for JSON."""
        return {"steps": self.steps, "strategies": [one.to_dict() for one in self.strategies]}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """A table, if possible no wider than `width` characters."""
        rows = [("strategy", "skips", "rate", "mean scale", "final scale", "flushed", "floor", "ceiling", "uncertain")]
        rows += [
            (
                one.strategy,
                f"{one.skips:,}",
                f"{one.skip_rate:.3%}",
                f"2^{one.mean_log2_scale:.2f}",
                f"{one.final_scale:.5g}",
                _share(one.flushed),
                _share(one.at_floor, 0),
                _share(one.at_ceiling, 0),
                f"{one.uncertain:,}",
            )
            for one in self.strategies
        ]
        return columns(rows, width)


def _share(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


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
