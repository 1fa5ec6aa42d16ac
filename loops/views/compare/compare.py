"""Compares two recorded runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import scaler
from loops.record import Recorded, as_recorded
from loops.views.compare.aligned import aligned, lost_of, other_batches_at, step_at, window_of
from loops.views.compare.differences import first_other_decision, first_other_scale, scales_known
from loops.views.compare.result import Comparison, Row
from loops.views.compare.sentence import sentence_of
from loops.views.compare.series import (
    Series,
    is_float32,
    is_loss,
    median_octaves,
    octaves,
    series_of,
    together,
    tolerance,
)
from loops.views.compare.settings import settings_that_differ
from loops.views.compare.truth import Truth

_MARGIN = 2.0
"""How many times the effect of other batches in the float32 run another run may owe to its batches."""


def compare(run: Any, other: Any, reference: Any = None) -> Comparison:
    """Finds where two runs part, tensor by tensor, by how much, and which of them is closer to float32.

    It compares the loss and the largest magnitude of each tensor that both traces have, with gradients divided by the
    loss scale. The result says something about the arithmetic only if both runs began with the same weights and took
    the same batches.

    The runs are aligned by applied updates: a skipped step moves no weight, and its batch is left out. From its first
    skip on, a run takes later batches at the same update, so differences come from the data, too; the comparison says
    so. If a run does not record which steps were applied, all runs are aligned by steps, and the comparison says why.

    Args:
        run: The folder of a run, or another source that `loops.views.plots` takes.
        other: The run to compare with.
        reference: The same run in float32. Without it, a float32 run among the two is the reference.

    Raises:
        scaler.InvalidArgument: If `reference` is not a float32 run.
        LoopError: If a run has no readable record.
    """
    third = as_recorded(reference) if reference is not None else None
    runs, third = _named((as_recorded(run), as_recorded(other)), third)
    if third is not None and not is_float32(third):
        raise scaler.InvalidArgument(
            f"{third.name}: a reference must compute in float32 throughout, and nothing says so: give a run of "
            "halfstep train --policy float32, or one with a trace whose tensors are all of float32."
        )
    true = third or next((one for one in runs if is_float32(one)), None)
    how = aligned([*runs, *([true] if true else [])])
    numbers = how.numbers[:2]
    first, second = (series_of(run, number) for run, number in zip(runs, numbers, strict=True))
    truth = Truth.of(true, how.numbers[2], runs, numbers) if true else None
    within = tolerance(*runs)
    rows = tuple(_row(name, first[name], second[name], truth, within) for name in first if name in second)
    rows = tuple(row for row in rows if row.steps)
    common = np.intersect1d(numbers[0][numbers[0] >= 0], numbers[1][numbers[1] >= 0])
    scales, decisions = first_other_scale(*runs), first_other_decision(*runs)
    found = Comparison(
        runs=(runs[0].name, runs[1].name),
        by=how.by,
        steps=len(common),
        lost=(lost_of(runs[0]), lost_of(runs[1])),
        batches=(len(runs[0]), len(runs[1])),
        other_batches_at=None if how.why else other_batches_at(runs, numbers),
        scale_differs_at=scales.step,
        scales_known=all(scales_known(run) for run in runs),
        decision_differs_at=decisions.step,
        parts_at_steps=None,
        rows=rows,
        alone=(
            tuple(name for name in first if name not in second and not is_loss(name)),
            tuple(name for name in second if name not in first and not is_loss(name)),
        ),
        settings=settings_that_differ(*({"accumulate": window_of(run), **run.facts} for run in runs)),
        reference=true.name if true else None,
        closer=_closer(runs, rows, true),
        sentence="",
        notes=tuple(f"{one.name}: {note}" for one in runs for note in one.notes),
        scale_differs_in=scales.parts,
        decision_differs_in=decisions.parts,
    )
    if found.parts_at is not None:
        steps = [step_at(run, number, found.parts_at) for run, number in zip(runs, numbers, strict=True)]
        found = dataclasses.replace(found, parts_at_steps=(steps[0], steps[1]))
    return dataclasses.replace(found, sentence=f"{sentence_of(found)} {how.why if rows else ''}".rstrip())


def _named(
    runs: tuple[Recorded, Recorded], third: Recorded | None
) -> tuple[tuple[Recorded, Recorded], Recorded | None]:
    """The runs and the float32 run with distinct names: their places, or numbers where the places do not help."""
    # A reference that is one of the two runs keeps the name of that run.
    twin = next((at for at, run in enumerate(runs) if third is not None and run.place and run.place == third.place), 2)
    given = [*runs, third] if third is not None and twin == 2 else [*runs]
    names, places = [run.name for run in given], [run.place for run in given]

    def name(run: Recorded, number: int) -> str:
        if names.count(run.name) == 1:
            return run.name
        return run.place if run.place and places.count(run.place) == 1 else f"{run.name} {number}"

    named = [dataclasses.replace(run, name=name(run, number)) for number, run in enumerate(given, 1)]
    return (named[0], named[1]), named[twin] if third is not None else None


def _row(name: str, one: Series, other: Series, truth: Truth | None, within: float) -> Row:
    number, first, second = together(one, other)
    far = octaves(first, second)
    with np.errstate(invalid="ignore"):
        rounding = within * np.maximum(np.abs(first), np.abs(second))
        apart = (far > 0) & ~(np.abs(first - second) <= rounding)
    at = int(np.argmax(apart)) if apart.any() else None
    finite = far[np.isfinite(far)]
    row = Row(
        name=name,
        formats=(one.format, other.format),
        steps=len(number),
        differs_at=int(number[np.argmax(far > 0)]) if (far > 0).any() else None,
        parts_at=None if at is None else int(number[at]),
        octaves=math.nan if at is None else float(far[at]),
        largest=float(finite.max()) if len(finite) else math.nan,
    )
    if truth is None or name not in truth.series:
        return row
    distances = median_octaves(one, truth.series[name]), median_octaves(other, truth.series[name])
    of_batches = truth.of_batches(name, 0), truth.of_batches(name, 1)
    return dataclasses.replace(row, distances=distances, of_batches=of_batches, closer=_nearer(distances, of_batches))


def _nearer(distances: tuple[float, float], of_batches: tuple[float, float]) -> int | None:
    """The index of the smaller distance, if the other one is larger by more than other batches explain."""
    if distances[0] == distances[1] or any(map(math.isnan, (*distances, *of_batches))):
        return None
    near = int(np.argmin(distances))
    return near if distances[1 - near] > distances[near] + _MARGIN * of_batches[1 - near] else None


def _closer(runs: tuple[Recorded, Recorded], rows: tuple[Row, ...], true: Recorded | None) -> str | None:
    """The run that is closer in more of the rows; None if neither is, or one of them is the float32 run itself."""
    if true is None or true in runs:
        return None
    wins = [sum(row.closer == place for row in rows) for place in (0, 1)]
    return None if wins[0] == wins[1] else runs[int(np.argmax(wins))].name
