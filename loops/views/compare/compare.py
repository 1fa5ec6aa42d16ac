"""Compares two recorded runs: where they first differ, in which settings, and how far each is from float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import scaler
from loops.record import Recorded, as_recorded
from loops.support.part_names import columns_of
from loops.views.compare.result import Comparison, Row, sentence_of
from loops.views.compare.series import (
    Series,
    aligned,
    is_float32,
    is_loss,
    lost_of,
    median_octaves,
    octaves,
    other_batches_at,
    series_of,
    together,
    tolerance,
    window_of,
)

_MARGIN = 2.0
"""How many times the effect of other batches in the float32 run another run may owe to its batches."""
_SETTINGS = ("task", "seed", "learning_rate", "batch_size", "batches", "accumulate", "optimizer", "loss_factor")


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
    truth = _Truth.of(true, how.numbers[2], runs, numbers) if true else None
    within = tolerance(*runs)
    rows = tuple(_row(name, first[name], second[name], truth, within) for name in first if name in second)
    rows = tuple(row for row in rows if row.steps)
    common = np.intersect1d(numbers[0][numbers[0] >= 0], numbers[1][numbers[1] >= 0])
    (scale_at, scale_in), (decision_at, decision_in) = (_first_other(runs, name) for name in ("loss_scale", "applied"))
    found = Comparison(
        runs=(runs[0].name, runs[1].name),
        by=how.by,
        steps=len(common),
        lost=(lost_of(runs[0]), lost_of(runs[1])),
        batches=(len(runs[0]), len(runs[1])),
        other_batches_at=None if how.why else other_batches_at(runs, numbers),
        scale_differs_at=scale_at,
        scales_known=all(_scales_known(run) for run in runs),
        decision_differs_at=decision_at,
        parts_at_steps=None,
        rows=rows,
        alone=(
            tuple(name for name in first if name not in second and not is_loss(name)),
            tuple(name for name in second if name not in first and not is_loss(name)),
        ),
        settings=_settings_that_differ(*({"accumulate": window_of(run), **run.facts} for run in runs)),
        reference=true.name if true else None,
        closer=_closer(runs, rows, true),
        sentence="",
        notes=tuple(f"{one.name}: {note}" for one in runs for note in one.notes),
        scale_differs_in=scale_in,
        decision_differs_in=decision_in,
    )
    if found.parts_at is not None:
        at = found.parts_at
        steps = [int(run.step[np.argmax(own == at)]) for run, own in zip(runs, numbers, strict=True)]
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


def _row(name: str, one: Series, other: Series, truth: _Truth | None, within: float) -> Row:
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


def _first_other(runs: tuple[Recorded, Recorded], column: str) -> tuple[int | None, tuple[str, ...]]:
    """Where the loss scales of two runs, or whether they skipped, first differ, or those of any part that both have.

    A micro-batch of a window is not skipped.

    Returns:
        The step, or None, and the parts of a composed step that differ there; none for a step of one loss.
    """
    found: dict[str, int | None] = {}
    for part, name in columns_of(runs[0].columns, column).items():
        if name in runs[1].columns:
            values = [run.columns[name] for run in runs]
            if column == "applied":
                attempted = f"{part}/attempted" if part else "attempted"
                values = [(run.column(attempted) != 0) & (run.columns[name] == 0) for run in runs]
            found[part] = _first(runs, values)
    at = min((step for step in found.values() if step is not None), default=None)
    return at, tuple(part for part, step in found.items() if part and step is not None and step == at)


def _scales_known(run: Recorded) -> bool:
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


def _settings_that_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that both runs record with different values, each with both values.

    Args:
        one: The first run's `Recorded.facts`.
        other: The other run's `Recorded.facts`.
    """
    first, second = _flat(one), _flat(other)
    shared = [name for name in first if name in second]
    different = [name for name in shared if str(first[name]) != str(second[name])]
    return tuple(f"{name} is {_shown(first[name])} and {_shown(second[name])}" for name in different)


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in _SETTINGS:
        value = facts.get(name)
        parts = value.items() if isinstance(value, Mapping) else [(None, value)]
        flat.update({f"{name}.{part}" if part else name: each for part, each in parts if each is not None})
    return flat


def _shown(value: object) -> str:
    # Keras keeps a learning rate in float32.
    return f"{value:.7g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class _Truth:
    """The float32 run.

    Attributes:
        series: Its values by name, aligned with those of the two runs.
        at_batches: For each run, the float32 run's values at that run's batches, aligned with the run; None if both
            took the same batches.
    """

    series: Mapping[str, Series]
    at_batches: tuple[Mapping[str, Series] | None, ...]

    @classmethod
    def of(cls, true: Recorded, number: np.ndarray, runs: Sequence[Recorded], numbers: Sequence[np.ndarray]) -> _Truth:
        """Reads the float32 run.

        Args:
            true: The run.
            number: Int64 [steps], the number that each of its steps is aligned by.
            runs: The two other runs.
            numbers: The numbers of their steps.
        """
        counted = (_at_steps(true, run, counts) for run, counts in zip(runs, numbers, strict=True))
        at_batches = tuple(None if np.array_equal(one, number) else series_of(true, one) for one in counted)
        return cls(series_of(true, number), at_batches)

    def of_batches(self, name: str, place: int) -> float:
        """The median octaves that other batches alone change a value by; 0 if the run has the same batches."""
        at_batches = self.at_batches[place]
        return 0.0 if at_batches is None else median_octaves(at_batches[name], self.series[name])


def _at_steps(true: Recorded, run: Recorded, number: np.ndarray) -> np.ndarray:
    """The numbers of the float32 run's steps if it had applied and skipped as the other run did."""
    at = np.searchsorted(run.step, true.step).clip(0, len(run) - 1)
    return np.where(run.step[at] == true.step, number[at], -1)
