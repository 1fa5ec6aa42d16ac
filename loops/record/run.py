"""A recorded run as arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from loops.record.columns import octaves_to_critical
from loops.record.thinned import Counted


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
class Recorded:
    """A recorded run.

    Attributes:
        name: The name of the run.
        place: The folder or file that it was read from; "" for arrays.
        step: Int64 [steps], in order, each once.
        columns: Float64 [steps] by the names of `NUMBERS` and `DECISIONS`, NaN if a step has no such number; a column
            that the run never wrote is missing.
        cause: Strings [steps], the name of a `scaler.Cause` for a skipped step, or "".
        tensors: What probes measured, or None.
        facts: Metadata from the run's `summary.json` or its checkpoints: `task`, `policy`, `strategy` and so on.
        versions: The versions of the libraries it ran with, by name; empty if unknown.
        replayed: What other strategies would have done on its steps: one mapping per strategy, as printed by
            `halfstep lab replay --json`.
        notes: What is missing or damaged: sentences that say how to record it.
        counted: What the run counted itself up to its newest checkpoint, or its end; None if nothing says it.
        traced: Whether steps were read from a trace.
        gauges: What ready probes measured, or None.
        evaluations: What an `Evaluate` or `evaluate_checkpoints` measured, or None.
    """

    name: str
    place: str
    step: np.ndarray
    columns: Mapping[str, np.ndarray]
    cause: np.ndarray
    tensors: Measured | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replayed: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    counted: Counted | None = None
    traced: bool = False
    gauges: Gauges | None = None
    evaluations: Gauges | None = None

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
