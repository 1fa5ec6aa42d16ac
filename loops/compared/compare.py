"""Compares two recorded runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import scaler
from loops.compared.result import Comparison, Row
from loops.compared.sentence import sentence_of
from loops.compared.series import LOSS, Series, is_float32, octaves, series_of, together, tolerance
from loops.recorded import Recorded, as_recorded


def compare(run: Any, other: Any, reference: Any = None) -> Comparison:
    """Says where two runs part, tensor by tensor, by how much, and which of them is closer to float32.

    What is compared is the largest magnitude of each tensor that both traces have, gradients divided by the loss scale,
    and the loss. It tells something of the arithmetic where both runs began with the same weights and took the same
    batches.

    Args:
        run: The folder of a run, or another source that `loops.plots` takes.
        other: The run to compare with.
        reference: The same run in float32. Without it, one of the two is taken if it is one.

    Raises:
        scaler.InvalidArgument: If `reference` is not of float32.
        LoopError: If a run has nothing that can be read.
    """
    runs = _named(as_recorded(run), as_recorded(other))
    third = as_recorded(reference) if reference is not None else None
    if third is not None and not is_float32(third):
        raise scaler.InvalidArgument(
            f"{third.name}: nothing says that it computed in float32 throughout, as a reference must: give a run of "
            "halfstep train --policy float32, or one with a trace whose tensors are all of float32."
        )
    true = third or next((one for one in runs if is_float32(one)), None)
    first, second = series_of(runs[0]), series_of(runs[1])
    truth = series_of(true) if true else {}
    within = tolerance(*runs)
    rows = tuple(_row(name, first[name], second[name], truth, within) for name in first if name in second)
    rows = tuple(row for row in rows if row.steps)
    steps, *_ = np.intersect1d(runs[0].step, runs[1].step, return_indices=True)
    found = Comparison(
        runs=(runs[0].name, runs[1].name),
        steps=len(steps),
        scale_differs_at=_first_difference(runs[0], runs[1], "loss_scale"),
        decision_differs_at=_first_difference(runs[0], runs[1], "applied"),
        rows=rows,
        alone=(
            tuple(name for name in first if name not in second and name != LOSS),
            tuple(name for name in second if name not in first and name != LOSS),
        ),
        reference=true.name if true else None,
        closer=_closer(runs, rows, true),
        sentence="",
        notes=tuple(f"{one.name}: {note}" for one in runs for note in one.notes),
    )
    return dataclasses.replace(found, sentence=sentence_of(found))


def _named(run: Recorded, other: Recorded) -> tuple[Recorded, Recorded]:
    if run.name != other.name:
        return run, other
    names = (run.place, other.place) if run.place != other.place else (f"{run.name} 1", f"{other.name} 2")
    return dataclasses.replace(run, name=names[0]), dataclasses.replace(other, name=names[1])


def _row(name: str, one: Series, other: Series, truth: Mapping[str, Series], within: float) -> Row:
    step, first, second = together(one, other)
    far = octaves(first, second)
    with np.errstate(invalid="ignore"):
        rounding = within * np.maximum(np.abs(first), np.abs(second))
        apart = (far > 0) & ~(np.abs(first - second) <= rounding)
    at = int(np.argmax(apart)) if apart.any() else None
    finite = far[np.isfinite(far)]
    row = Row(
        name=name,
        formats=(one.format, other.format),
        steps=len(step),
        differs_at=int(step[np.argmax(far > 0)]) if (far > 0).any() else None,
        parts_at=None if at is None else int(step[at]),
        octaves=math.nan if at is None else float(far[at]),
        largest=float(finite.max()) if len(finite) else math.nan,
    )
    if name not in truth:
        return row
    distances = _distance(one, truth[name]), _distance(other, truth[name])
    closer = None if distances[0] == distances[1] or any(map(math.isnan, distances)) else int(np.argmin(distances))
    return dataclasses.replace(row, distances=distances, closer=closer)


def _distance(one: Series, truth: Series) -> float:
    _, values, true = together(one, truth)
    return float(np.median(octaves(values, true))) if len(values) else math.nan


def _closer(runs: tuple[Recorded, Recorded], rows: tuple[Row, ...], true: Recorded | None) -> str | None:
    """The run that is closer in more of the rows; None where none is, or one of them is the float32 run itself."""
    if true is None or true in runs:
        return None
    wins = [sum(row.closer == place for row in rows) for place in (0, 1)]
    return None if wins[0] == wins[1] else runs[int(np.argmax(wins))].name


def _first_difference(run: Recorded, other: Recorded, column: str) -> int | None:
    if column not in run.columns or column not in other.columns:
        return None
    step, first, second = np.intersect1d(run.step, other.step, assume_unique=True, return_indices=True)
    one, two = run.columns[column][first], other.columns[column][second]
    differs = (one != two) & ~(np.isnan(one) & np.isnan(two))
    return int(step[np.argmax(differs)]) if differs.any() else None
