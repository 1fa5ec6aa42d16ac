"""Compares two recorded runs: where they first differ, in which settings, and how far each is from float32.

The values are the loss, and the largest magnitude of each tensor, unscaled. Runs are aligned by applied updates, or by
steps if the updates of a run cannot be counted: two runs with the same number of updates have trained equally long. A
skipped step moves nothing, so a run that skips is behind at the same step, and sees later batches at the same update.
Batches that moved no weight are left out where runs are aligned by updates. Where they are aligned by steps, the
gradients of skipped steps are left out: their values at a lower scale are unknown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import scaler
from loops.loop.silence import of_applied
from loops.record import Recorded, as_recorded
from loops.record.reading import distinct
from loops.support.part_names import columns_of
from loops.views.compare.result import LOSS, MICRO_BATCH, STEP, UPDATE, Comparison, Row, is_loss, sentence_of

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
    at = min((row.parts_at for row in rows if row.parts_at is not None), default=None)
    steps = None
    if at is not None:
        one, two = (int(run.step[np.argmax(own == at)]) for run, own in zip(runs, numbers, strict=True))
        steps = (one, two)
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
        parts_at_steps=steps,
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
    return dataclasses.replace(found, sentence=f"{sentence_of(found)} {how.why if rows else ''}".rstrip())


def _named(
    runs: tuple[Recorded, Recorded], third: Recorded | None
) -> tuple[tuple[Recorded, Recorded], Recorded | None]:
    """The runs and the float32 run with distinct names: their places, or numbers where the places do not help."""
    # A reference that is one of the two runs keeps the name of that run.
    twin = next((at for at, run in enumerate(runs) if third is not None and run.place and run.place == third.place), 2)
    named = distinct([*runs, third] if third is not None and twin == 2 else runs)
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
        at_batches: list[Mapping[str, Series] | None] = []
        for run, counted in zip(runs, numbers, strict=True):
            # The numbers of the float32 run's steps if it had applied and skipped as the other run did.
            at = np.searchsorted(run.step, true.step).clip(0, len(run) - 1)
            own = np.where(run.step[at] == true.step, counted[at], -1)
            at_batches.append(None if np.array_equal(own, number) else series_of(true, own))
        return cls(series_of(true, number), tuple(at_batches))

    def of_batches(self, name: str, place: int) -> float:
        """The median octaves that other batches alone change a value by; 0 if the run has the same batches."""
        at_batches = self.at_batches[place]
        return 0.0 if at_batches is None else median_octaves(at_batches[name], self.series[name])


_ROUNDINGS = 8.0
"""How many roundings of the coarser format two runs may differ by: sums in another order differ by a few."""
_USUAL = "float16"
"""The format assumed of a run that does not record one."""


class Series(NamedTuple):
    """A value over the updates or the steps of a run.

    Attributes:
        number: Int64 [n], the numbers of the updates or steps, ascending.
        values: Float64 [n].
        format: The format it was computed in, or None if unknown.
    """

    number: np.ndarray
    values: np.ndarray
    format: str | None


def series_of(run: Recorded, number: np.ndarray) -> dict[str, Series]:
    """The values of a run by name, with gradients divided by their loss scale.

    Args:
        run: The run.
        number: Int64 [steps], the number of each step's update or step; -1 leaves the step out.
    """
    kept = number >= 0
    found = {}
    for part, name in columns_of(run.columns, "loss").items():
        loss = run.column(name)
        taken = kept & ~np.isnan(loss) if part else kept  # Between its turns a part has none.
        found[f"{LOSS} of {part}" if part else LOSS] = Series(number[taken], loss[taken], narrowest(run))
    measured = run.tensors
    if measured is None:
        return found
    at = np.searchsorted(run.step, measured.step).clip(0, len(run.step) - 1)
    there = run.step[at] == measured.step
    kept = there & kept[at]
    applied = kept & ~run.skipped[at]
    number = number[at]
    scale = run.column("loss_scale")[at] if "loss_scale" in run.columns else np.ones(len(at))
    for place, name in enumerate(measured.names):
        values = measured.amax[:, place].astype(np.float64)
        if measured.carries_scale[place]:
            found[name] = Series(number[applied], (values / scale)[applied], measured.formats[place])
        else:
            found[name] = Series(number[kept], values[kept], measured.formats[place])
    return found


def is_float32(run: Recorded) -> bool | None:
    """Whether a run computed in float32 throughout; None if unknown."""
    if isinstance(run.facts.get("policy"), str):
        return run.facts["policy"] == "float32"
    return set(run.tensors.formats) == {"float32"} if run.tensors else None


def tolerance(*runs: Recorded) -> float:
    """The relative difference that rounding may make between runs."""
    return _ROUNDINGS * max(scaler.float_format(narrowest(run) or _USUAL).epsilon for run in runs)


def together(one: Series, other: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers that both series have, and the values of each at these."""
    number, first, second = np.intersect1d(one.number, other.number, assume_unique=True, return_indices=True)
    return number, one.values[first], other.values[second]


def octaves(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """|log2| of the ratio of magnitudes: 0 where both are equal, infinite where one is zero or not finite."""
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.abs(np.log2(np.abs(first)) - np.log2(np.abs(second)))
    found = np.where(np.isnan(found) | ((first < 0) != (second < 0)), np.inf, found)
    return np.where(same, 0.0, found)


def median_octaves(one: Series, other: Series) -> float:
    """The median of the octaves between two series where both have a value; NaN where they never do."""
    _, first, second = together(one, other)
    return float(np.median(octaves(first, second))) if len(first) else np.nan


def narrowest(run: Recorded) -> str | None:
    """The coarsest format that a run computes in, or None if unknown.

    A value in float32 may come from values in that format.
    """
    if run.tensors:
        return max(run.tensors.formats, key=lambda name: scaler.float_format(name).epsilon)
    policy = str(run.facts.get("policy", "")).removeprefix("mixed_")
    return policy if policy in ("float32", "float16", "bfloat16") else None


class Aligned(NamedTuple):
    """How some runs are aligned.

    Attributes:
        by: `UPDATE`; `MICRO_BATCH` if a run sums gradients over windows; or `STEP`.
        why: A sentence that says why they are aligned by step; "" otherwise.
        numbers: For each run, int64 [steps]: the number of each step's batch, counted from 1; -1 for a batch that
            moved no weight.
    """

    by: str
    why: str
    numbers: tuple[np.ndarray, ...]


def aligned(runs: Sequence[Recorded]) -> Aligned:
    """Aligns runs by applied updates if the updates of all can be counted, else by steps."""
    why = next((f"{run.name} {reason}" for run in runs if (reason := _why_uncountable(run))), "")
    if why:
        said = f"They are aligned by step, not by applied update: {why}, so its updates cannot be counted."
        return Aligned(STEP, said, tuple(run.step for run in runs))
    windows = any(not run.attempted.all() for run in runs)
    moved = [of_applied(run.attempted, run.column("applied") == 1) for run in runs]
    return Aligned(MICRO_BATCH if windows else UPDATE, "", tuple(np.where(one, one.cumsum(), -1) for one in moved))


def lost_of(run: Recorded) -> int | None:
    """How many batches a run lost to skipped steps, or None if it does not record it."""
    return None if _why_uncountable(run) else int(of_applied(run.attempted, run.column("applied") == 0).sum())


def window_of(run: Recorded) -> int | None:
    """How many batches a run takes for an update, or None if it does not record it."""
    return None if _why_uncountable(run) or not run.attempted.any() else int(run.step[run.attempted][0])


def other_batches_at(runs: Sequence[Recorded], numbers: Sequence[np.ndarray]) -> int | None:
    """The first number at which two runs took batches of different steps, or None."""
    steps, others = (run.step[number >= 0] for run, number in zip(runs, numbers, strict=True))
    both = min(len(steps), len(others))
    differs = steps[:both] != others[:both]
    # Without such a number they are aligned by updates, counted from 1, or by steps, which never differ.
    return int(np.argmax(differs)) + 1 if differs.any() else None


def _why_uncountable(run: Recorded) -> str:
    """Why the updates of a run cannot be counted, or ""."""
    if "applied" not in run.columns:
        return "does not record which steps were applied"
    if not np.array_equal(run.step, np.arange(1, len(run) + 1)):
        return "does not record every step from the first on"
    if np.isnan(run.column("applied")[run.attempted]).any():
        return "does not record for every step whether it was applied"
    return ""
