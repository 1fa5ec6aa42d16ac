"""The results of a replay: their table with what may be relied on, a file of their scales, and a figure."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loops.replay.intervals import Intervals
from loops.support.drawing import drawing
from loops.support.palette import LINE, mark
from loops.support.text import columns
from loops.support.written import as_path, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMS = {
    "skips": ("skips", "{:,.0f}"),
    "skip_rate": ("rate", "{:.3%}"),
    "mean_log2_scale": ("mean scale", "2^{:.2f}"),
    "final_scale": ("final scale", "{:.5g}"),
    "flushed": ("flushed", "{:.3%}"),
    "at_floor": ("floor", "{:.0%}"),
    "at_ceiling": ("ceiling", "{:.0%}"),
}
"""The heading of each figure, and how it and both ends of its interval are shown."""


class Result:
    """A dataclass whose arrays are not shown."""

    def to_dict(self) -> dict[str, Any]:
        """All fields but arrays, as JSON values."""
        return _as_json(self)


class Tabled(Result):
    """A result that is shown as a table."""

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """A table, if possible no wider than `width` characters, and what follows from it."""
        raise NotImplementedError


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {one.name: _as_json(getattr(value, one.name)) for one in dataclasses.fields(value) if one.repr}
    return list(map(_as_json, value)) if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True)
class Course(Result):
    """The figures of a strategy over the attempted steps of a run: replayed, recorded or trained.

    Attributes:
        strategy: The strategy's name.
        skips: The number of skipped steps.
        skip_rate: Their share of all steps.
        mean_log2_scale: The mean of log2 of the loss scales.
        final_scale: The last loss scale.
    """

    strategy: str
    skips: int
    skip_rate: float
    mean_log2_scale: float
    final_scale: float


def figures_of(scales: np.ndarray, skipped: np.ndarray, final: float) -> dict[str, Any]:
    """The figures of a `Course`, by name.

    Args:
        scales: Float32 [steps].
        skipped: Bool [steps].
        final: The last scale.
    """
    return {
        "skips": int(skipped.sum()),
        "skip_rate": float(skipped.mean()),
        "mean_log2_scale": float(np.log2(scales.astype(np.float64)).mean()),
        "final_scale": final,
    }


def cells(one: Course, names: Iterable[str]) -> list[str]:
    """Some of the figures, as text."""
    values = ((getattr(one, name), _FORMS[name][1]) for name in names)
    return ["-" if value is None else form.format(value) for value, form in values]


@dataclasses.dataclass(frozen=True)
class Replayed(Course):
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
    runs: tuple[Replayed, ...] = ()


@dataclasses.dataclass(frozen=True)
class Replay(Tabled):
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

    def text(self, width: int | None = None) -> str:
        """A row for each strategy, a second one of its intervals, and which columns hold.

        If possible the table is no wider than `width` characters.
        """
        rows: list[tuple[str, ...]] = [
            ("strategy", *(head for head, _ in _FORMS.values()), "uncertain", "may differ at")
        ]
        for one in self.strategies:
            differs = "never" if one.may_differ_at is None else f"{one.may_differ_at:,}"
            rows.append((one.strategy, *cells(one, _FORMS), f"{one.uncertain:,}", differs))
            if one.intervals is not None:
                ranges = [(getattr(one.intervals, name), form) for name, (_, form) in _FORMS.items()]
                shown = (f"{form} to {form}".format(*ends) if ends else "-" for ends, form in ranges)
                rows.append(("  90% of runs", *shown, "", ""))
        return "\n".join([columns(rows, width), *_sentences(self.strategies, self.lacking)])


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


def _sentences(strategies: Sequence[Replayed], lacking: str | None) -> list[str]:
    if all(one.may_differ_at is None for one in strategies):
        return ["No skip is near to differing from those of the recorded run: every column holds."]
    how = " within their intervals" if any(one.intervals is not None for one in strategies) else ", but for a few"
    lines = [
        "After 'may differ at', where a skip differs from the recorded run's or nearly does, a real run is another.",
        f"There skips and rate hold{how}; mean scale, final scale, flushed, floor and ceiling are indicative.",
    ]
    stalling = [one.strategy for one in strategies if one.may_stall]
    if stalling:
        lines.append(
            f"The skips of {', '.join(stalling)} do not hold: a run may go on skipping where the scale does not fall."
        )
    return lines if lacking is None else [*lines, lacking]


_POINTS = 2000
"""The most that are drawn of a line, each the extremes of the steps around it."""


def replay_figure(step: np.ndarray, limit: np.ndarray, scales: Mapping[str, np.ndarray]) -> Figure:
    """A line of scales for each strategy, and a grey area above the limit, where a step is skipped.

    Args:
        step: Int [steps], the steps' numbers.
        limit: Float [steps]; a step with a scale above it is skipped.
        scales: The scales of each strategy by its name, float [steps].
    """
    with drawing(3.2) as figure:
        from loops.support.drawing import shortened

        axes = figure.subplots()
        every = -(-len(step) // _POINTS)
        highest = 4 * max(float(np.max(one)) for one in scales.values())
        x = step[::every]
        shown = np.clip(_least(limit, every), np.finfo(np.float32).tiny, highest)
        axes.fill_between(x, shown, highest, step="mid", color=LINE, linewidth=0, label="skipped")
        for number, (name, values) in enumerate(scales.items()):
            axes.step(x, -_least(-values, every), where="mid", label=shortened(name, 60), **mark(number).line)
        axes.set_yscale("log", base=2)
        lowest = min(float(np.min(one)) for one in scales.values())
        axes.set_ylim(lowest / 4, highest)
        axes.set_xlim(step[0], max(step[-1], step[0] + 1))
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        legend = figure.legend(loc="outside lower left", ncols=2, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return figure


def _least(values: np.ndarray, every: int) -> np.ndarray:
    """The minimum of each group of `every` values."""
    return np.minimum.reduceat(values, np.arange(0, len(values), every))
