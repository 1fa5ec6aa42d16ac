"""One table of steps, whatever it was read from: its columns, and what follows from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

import scaler

NUMBERS = ("loss", "loss_scale", "grad_norm", "clipped_norm", "critical_low", "critical_high", "headroom")
"""Columns of numbers."""
RETRIES = "retries"
"""How often a step took its gradients again: a column of numbers that only a log has."""
DECISIONS = ("attempted", "applied")
"""Columns of bools."""
_LONGEST_CAUSE = 40
"""An array of texts has room for the longest at each place, so that one long text would take all of the memory."""


def cause_name(value: Any) -> str:
    """The name of a `scaler.Cause`; "" if there is none.

    Args:
        value: A value of the column `cause`: the name, or the number that `Csv` and users' own programs write.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return scaler.Cause(value).name if value and value in list(scaler.Cause) else ""
    # A terminal obeys what cannot be printed.
    return value[:_LONGEST_CAUSE] if isinstance(value, str) and value.isprintable() else ""


def octaves_to_critical(low: np.ndarray, high: np.ndarray, loss_scale: np.ndarray) -> np.ndarray:
    """Float64 [steps]: log2 of the critical scale over the loss scale; minus infinity where no scale is finite.

    Args:
        low: The column `critical_low`.
        high: The column `critical_high`, which counts where `low` is 0: the step was not finite.
        loss_scale: The column `loss_scale`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(np.where(low > 0, low, high)) - np.log2(loss_scale)


_Table = TypeVar("_Table", bound="Steps")


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """A table of steps.

    Attributes:
        step: Int64 [steps], in order, each once.
        columns: Float64 [steps] by the names of `NUMBERS`, `DECISIONS` and `RETRIES`, also of the parts of a composed
            step, such as "critic/loss"; NaN if a step has no such number. A column that was never written is missing.
        cause: Strings [steps], the name of a `scaler.Cause` for a skipped step, or "".
    """

    step: np.ndarray
    columns: Mapping[str, np.ndarray]
    cause: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> np.ndarray:
        """A column; all NaN if the run does not have it."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    @functools.cached_property
    def attempted(self) -> np.ndarray:
        """Bool [steps]: whether a decision was taken; True if the run does not say."""
        return self.column("attempted") != 0

    @functools.cached_property
    def known(self) -> np.ndarray:
        """Bool [steps]: whether it says if the step was applied; all of them if it never says."""
        return ~np.isnan(self.columns["applied"]) if "applied" in self.columns else np.full(len(self), True)

    @functools.cached_property
    def skipped(self) -> np.ndarray:
        """Bool [steps]: attempted and not applied."""
        return self.attempted & (self.column("applied") == 0)

    @functools.cached_property
    def causes(self) -> dict[str, np.ndarray]:
        """For each cause the steps that were skipped because of it, the most frequent cause first."""
        named = np.where(self.cause == "", "unknown", self.cause)
        found = {str(name): self.step[self.skipped & (named == name)] for name in np.unique(named[self.skipped])}
        return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))

    @functools.cached_property
    def critical(self) -> np.ndarray:
        """Float64 [steps]: the largest power of two at which each step would have been finite; NaN if unknown.

        A lower bound; for a step that was not finite, an upper bound.
        """
        low, high = self.column("critical_low"), self.column("critical_high")
        found = np.where(low > 0, low, high)
        return np.where(np.isfinite(found) & (found > 0), found, np.nan)

    @functools.cached_property
    def margin(self) -> np.ndarray:
        """Float64 [steps]: octaves from the loss scale to the critical scale; NaN if unknown.

        A lower bound on the headroom. For a step that was not finite it is a negative upper bound, and minus infinity
        if no scale helps.
        """
        octaves = octaves_to_critical(*(self.column(name) for name in ("critical_low", "critical_high", "loss_scale")))
        return np.where(np.isposinf(octaves), np.nan, octaves)

    def where(self: _Table, kept: np.ndarray | slice) -> _Table:
        """The table of some of the steps, which a mask or their places choose."""
        columns = {name: values[kept] for name, values in self.columns.items()}
        return dataclasses.replace(self, step=self.step[kept], columns=columns, cause=self.cause[kept])


NO_STEPS = Steps(np.zeros(0, np.int64), {}, np.zeros(0, np.str_))


def joined(trace: Steps | None, log: Steps | None) -> Steps:
    """The steps of both, each once. Where both have a number, that of the trace counts, which tells NaN from infinity.

    Args:
        trace: The steps of the trace, or None if there is none.
        log: Those of the log, or None if there is none.
    """
    parts = [part for part in (trace, log) if part is not None and len(part)]
    if len(parts) < 2:
        return parts[0] if parts else NO_STEPS
    step = np.union1d(parts[0].step, parts[1].step)
    own, other = (_spread(part, step) for part in parts)
    columns = {
        name: np.where(np.isnan(own.column(name)), other.column(name), own.column(name))
        for name in {**own.columns, **other.columns}
    }
    return Steps(step, columns, np.where(own.cause == "", other.cause, own.cause))


def _spread(table: Steps, step: np.ndarray) -> Steps:
    """The table with a row for each of these steps, also of those that it lacks."""
    at = np.searchsorted(step, table.step)
    columns = {name: np.full(len(step), np.nan) for name in table.columns}
    for name, values in columns.items():
        values[at] = table.columns[name]
    cause = np.full(len(step), "", table.cause.dtype)
    cause[at] = table.cause
    return Steps(step, columns, cause)


def parts_at(trace: Steps, log: Steps) -> int | None:
    """The first step that both have with another finite number in one of their columns: then they are of two runs."""
    common, here, there = np.intersect1d(trace.step, log.step, return_indices=True)
    differs = np.zeros(len(common), bool)
    for name in ("loss", "loss_scale", "grad_norm"):
        if name in trace.columns and name in log.columns:
            one, other = trace.columns[name][here], log.columns[name][there]
            known = np.isfinite(one) & np.isfinite(other)
            differs |= known & ~np.isclose(one, np.where(known, other, 0.0), rtol=1e-6, atol=0.0)
    return int(common[differs][0]) if differs.any() else None


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run's probes measured. The histograms are a sparse array, with one entry for each nonzero bin.

    Attributes:
        step: Int64 [steps], those that were measured, in order.
        names: The tensors' names, such as "activations/dense_1".
        formats: For each tensor the name of the format that it was computed in.
        carries_scale: Bool [tensors]: whether the values were multiplied by the loss scale.
        amax: Float32 [steps, tensors], the largest measured magnitudes; infinity or NaN if there was one, and 0 where
            a part of the step was not measured.
        missing: Bool [steps, tensors], where that is so.
        counted: Int64 [entries], the step of each entry, in order.
        tensor: Int64 [entries], the index in `names` of each entry.
        bin: Int64 [entries], the bin of each entry, see `scaler.observe`.
        count: Int64 [entries], how many values are in the bin.
    """

    step: np.ndarray
    names: tuple[str, ...]
    formats: tuple[str, ...]
    carries_scale: np.ndarray
    amax: np.ndarray
    missing: np.ndarray
    counted: np.ndarray
    tensor: np.ndarray
    bin: np.ndarray
    count: np.ndarray

    @functools.cached_property
    def frames(self) -> np.ndarray:
        """Int64 [frames]: the steps that have histograms."""
        return np.unique(self.counted)

    def at(self, step: np.ndarray) -> np.ndarray:
        """Float32 [steps, tensors]: `amax` at some steps, NaN where a tensor was not measured."""
        found = np.full([len(step), len(self.names)], np.nan, np.float32)
        _, here, there = np.intersect1d(step, self.step, assume_unique=True, return_indices=True)
        found[here] = np.where(self.missing, np.nan, self.amax)[there]
        return found


@dataclasses.dataclass(frozen=True)
class Gauges:
    """What was measured at some of a run's steps: by its ready probes, or of its checkpoints.

    Attributes:
        step: Int64 [steps], in order.
        names: Such as "update_rms/dense_1".
        values: Float64 [steps, names]; NaN where a step was not measured.
    """

    step: np.ndarray
    names: tuple[str, ...]
    values: np.ndarray

    def of(self, output: str) -> Gauges:
        """Those of one output, named by what they belong to, such as "dense_1"."""
        places = [place for place, name in enumerate(self.names) if name.startswith(f"{output}/")]
        names = tuple(self.names[place].removeprefix(f"{output}/") for place in places)
        return Gauges(self.step, names, self.values[:, places])


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a run counted itself, whatever it logged.

    Attributes:
        steps: The number of its steps.
        skips: How many of them were skipped.
    """

    steps: int
    skips: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Recorded(Steps):
    """A recorded run: its steps, and what else is known of it.

    Attributes:
        name: The name of the run.
        place: The folder or file that it was read from; "" for arrays.
        tensors: What probes measured, or None.
        facts: Metadata from the run's `summary.json` or its checkpoints: `task`, `policy`, `strategy` and so on.
        versions: The versions of the libraries it ran with, by name; empty if unknown.
        replayed: What other strategies would have done on its steps: one mapping per strategy, as printed by
            `halfstep lab replay --json`.
        notes: What is missing or damaged: sentences that say how to record it.
        counted: What the run counted itself up to its newest checkpoint, or its end; None if nothing says it.
        traced: Whether steps were read from a trace.
        parts: The names of the parts of a composed step, if it has a trace.
        lacks: Why the largest gradient of a step is unknown despite probes, see `TraceTables.lacks`.
        gauges: What ready probes measured, or None.
        evaluations: What an `Evaluate` or `evaluate_checkpoints` measured, or None.
    """

    name: str
    place: str = ""
    tensors: Measured | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replayed: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    counted: Counted | None = None
    traced: bool = False
    parts: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    gauges: Gauges | None = None
    evaluations: Gauges | None = None
