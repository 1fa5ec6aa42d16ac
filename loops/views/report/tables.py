"""Tables of a report: the values of each figure, and the strategy of each run with its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loops.record.steps import Recorded
from loops.record.summary import Digest, number
from loops.support.json_values import as_float
from loops.support.pages import Table
from loops.support.text import share
from loops.views.chart import sampled

_ROWS = 24
"""The most rows of a table of steps."""
_SKIPS = 60
"""The most rows of a table of skips."""
NONE = "\u2013"
_INFINITY = "\u221e"


def cell(value: float | int | str | None, form: str = ".4g") -> str:
    """A value as the text of a cell."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return _INFINITY if value > 0 else f"\u2212{_INFINITY}"
    return (f"{value:,}" if isinstance(value, int) else f"{value:{form}}").replace("-", "\u2212")


def scale_cell(value: float) -> str:
    """A loss scale as the text of a cell."""
    return number(value) if math.isfinite(value) else cell(value)


def of_steps(
    step: np.ndarray,
    columns: Sequence[tuple[str, np.ndarray]],
    show: Callable[[float], str] = cell,
    kind: str = "step",
) -> Table:
    """Some columns at evenly spaced steps."""
    places = sampled(len(step), _ROWS).tolist()
    rows = [[cell(int(step[at])), *(show(float(values[at])) for _, values in columns)] for at in places]
    said = "" if len(places) == len(step) else f"{len(places)} of {len(step):,} {kind}s"
    return Table(["step", *(name for name, _ in columns)], rows, said)


def of_skips(run: Recorded) -> list[Table]:
    """A table of the skipped steps, only the first and the last if there are many; none if no step was skipped."""
    places = np.flatnonzero(run.skipped).tolist()
    if not places:
        return []
    shown = places if len(places) <= _SKIPS else [*places[: _SKIPS // 2], *places[-_SKIPS // 2 :]]
    scale = run.column("loss_scale")
    rows = [
        [cell(int(run.step[at])), cell(str(run.cause[at]) or "unknown"), scale_cell(float(scale[at]))] for at in shown
    ]
    said = "Skipped steps"
    if len(shown) < len(places):
        said = f"Skipped steps: the first {_SKIPS // 2} and the last {_SKIPS // 2} of {len(places):,}"
    return [Table(["step", "cause", "loss scale"], rows, said)]


_HEADS = (
    "run",
    "strategy",
    "format",
    "steps",
    "skips",
    "skip rate",
    "mean log2 scale",
    "final scale",
    "headroom",
    "final loss",
    "score",
)
_AS_COLUMNS = 4
"""The most runs that are shown as columns rather than rows."""


def strategies_table(runs: Sequence[Recorded], digests: Sequence[Digest]) -> Table:
    """A row for each run, or a column if there are few, with the figures that any of them has."""
    rows = [_row(run, found) for run, found in zip(runs, digests, strict=True)]
    shown = [place for place in range(len(_HEADS)) if any(row[place] != NONE for row in rows)]
    heads, *rows = [[row[place] for place in shown] for row in (_HEADS, *rows)]
    # A few columns fit a phone, too.
    turned = len(rows) <= _AS_COLUMNS
    lines = [list(line) for line in zip(heads, *rows, strict=True)] if turned else [heads, *rows]
    return Table(lines[0], lines[1:])


def replayed_table(run: Recorded) -> Table | None:
    """What other strategies would have done on a run's steps; None if the run was not replayed."""
    if not run.replayed:
        return None
    rows = [
        [
            cell(row["strategy"]),
            _with_interval(row, "skips", lambda value: cell(value, ",.0f")),
            _with_interval(row, "skip_rate", _share),
            _with_interval(row, "mean_log2_scale", lambda value: cell(value, ".1f")),
            _with_interval(row, "final_scale", scale_cell),
            _with_interval(row, "flushed", _share),
            cell(as_float(row.get("may_differ_at")), ",.0f"),
        ]
        for row in run.replayed
    ]
    heads = ("strategy", "skips", "skip rate", "mean log2 scale", "final scale", "flushed", "may differ at")
    return Table(heads, rows)


def _with_interval(row: Mapping[str, Any], name: str, show: Callable[[float], str]) -> str:
    """A figure, with where 90% of real runs lie if that is known."""
    figure, known = show(as_float(row.get(name))), row.get("intervals")
    ends = known.get(name) if isinstance(known, Mapping) else None
    if not isinstance(ends, list) or len(ends) != 2:
        return figure
    low, high = (show(as_float(end)) for end in ends)
    return f"{figure} ({low} to {high})"


def _share(value: float) -> str:
    return NONE if math.isnan(value) else share(value)


def _row(run: Recorded, found: Digest) -> list[str]:
    facts = run.facts
    score = NONE
    if isinstance(facts.get("accuracy"), float):
        score = f"{facts['accuracy']:.1%} accuracy"
    elif isinstance(facts.get("perplexity"), float):
        score = f"perplexity {facts['perplexity']:.4g}"
    known, steps, skips, rate = "applied" in run.columns, found.steps, found.skips, found.skip_rate
    if found.health.thinned:
        # The skips of the steps that happen to be logged say nothing of the run.
        known = run.counted is not None
    if found.health.thinned and run.counted:
        steps, skips, rate = run.counted.steps, run.counted.skips, run.counted.skips / run.counted.steps
    return [
        run.name,
        cell(facts.get("strategy") if isinstance(facts.get("strategy"), str) else None),
        cell(facts.get("policy") if isinstance(facts.get("policy"), str) else _formats(run)),
        cell(steps),
        cell(skips if known else None),
        share(rate) if known else NONE,
        _each(found, "mean_log2_scale", lambda value: cell(value, ".1f")),
        _each(found, "final_scale", scale_cell),
        cell(found.margin, ".1f"),
        _each(found, "final_loss", cell),
        score,
    ]


def _each(found: Digest, name: str, show: Callable[[float], str]) -> str:
    """A figure of the run; where it has none, those of the parts of a composed step, or one that they share."""
    own = getattr(found, name)
    if not math.isnan(own) or not found.parts:
        return show(own)
    values = {part: show(getattr(one, name)) for part, one in found.parts.items()}
    shared = set(values.values()) if name != "final_loss" else set()
    if len(shared) == 1:
        return shared.pop()
    return ", ".join(f"{part} {value}" for part, value in values.items())


def _formats(run: Recorded) -> str | None:
    return " and ".join(sorted(set(run.tensors.formats))) if run.tensors else None
