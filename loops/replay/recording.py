"""The attempted steps of a trace as arrays, and the largest loss scale at which each would have been finite."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import scaler
from loops.record import Recorded, as_recorded
from loops.record.files import trace_of
from loops.record.trace import TraceTables, read
from loops.record.trace.tensors import probes_for
from loops.support.errors import LoopError
from loops.support.written import as_path

Source = str | os.PathLike | TraceTables
_HOPELESS = ("LOSS", "BACKWARD", "TOO_LARGE", "UPDATE")
"""Causes of a skip that no loss scale helps, by the names of `scaler.Cause`."""
_ROUNDING = 2.0**-10
"""The relative error of a measured magnitude, which was rounded to float16 or bfloat16."""
_LARGEST = float(np.finfo(np.float32).max)
LEAST, MOST = -149, 129
"""The first and the last octave in which gradients are counted."""


def tables_of(sources: Source | Sequence[Source]) -> list[tuple[str, TraceTables]]:
    """Pairs of name and trace, from files, folders of runs, or what `read` returned.

    Raises:
        LoopError: If a trace cannot be read.
        scaler.InvalidArgument: If a source is not a trace, or there is none.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike, TraceTables)) else list(sources)
    if not listed:
        raise scaler.InvalidArgument("replay(traces=[]): expected at least one trace.")
    return [_named(source, number) for number, source in enumerate(listed, 1)]


def _named(source: Source, number: int) -> tuple[str, TraceTables]:
    if isinstance(source, TraceTables):
        return f"trace {number}", source
    place = as_path("replay", "traces", source)
    found = trace_of(place) if place.is_dir() else place
    if found is None:
        raise LoopError(
            f"{place}: it has no trace.arrow. Name the file, or record one: halfstep train --trace, or hs.Trace in "
            "a program."
        )
    return str(found), read(found)


class Entries(NamedTuple):
    """The nonzero bins of the histograms of the attempted steps: int64 [entries].

    Attributes:
        row: The index of the step in the recording.
        tensor: The index of the tensor.
        bin: The bin, see `scaler.observe`.
        values: How many values are in it.
    """

    row: np.ndarray
    tensor: np.ndarray
    bin: np.ndarray
    values: np.ndarray


class Lost(NamedTuple):
    """The number of values that would be flushed to zero, and that of all values."""

    flushed: float
    values: float


@dataclasses.dataclass(frozen=True)
class Recording:
    """The attempted steps of a trace.

    Attributes:
        name: The name of the trace, for messages.
        run: The trace.
        step: Int64 [steps], the steps' numbers.
        scale: Float64 [steps], the recorded loss scales.
        applied: Bool [steps].
        of_loss: Bool [steps], whether they were skipped because their loss was not finite.
        limits: The scales up to which the steps would have been finite.
    """

    name: str
    run: Recorded
    step: np.ndarray
    scale: np.ndarray
    applied: np.ndarray
    of_loss: np.ndarray
    limits: _Limits

    @functools.cached_property
    def entries(self) -> Entries:
        """The histograms of these steps."""
        seen = self.run.tensors
        if seen is None:
            return Entries(*[np.zeros(0, np.int64)] * 4)
        row = np.searchsorted(self.step, seen.counted)
        kept = np.append(self.step, -1)[row] == seen.counted
        return Entries(row[kept], seen.tensor[kept], seen.bin[kept], seen.count[kept])

    @functools.cached_property
    def largest_gradient(self) -> np.ndarray:
        """The largest unscaled gradient of a weight at each step, see `Event.amax`: float32 [steps].

        It is 0 for a skipped step, where it is unknown; a strategy takes 0 for no information.

        Raises:
            LoopError: If the trace does not have it.
        """
        run = self.run
        names = run.tensors.names if run.tensors else ()
        weights = [place for place, name in enumerate(names) if name.startswith("weight_gradients/")]
        watch = f"{probes_for(run.parts)}, of all layers"
        reasons = {
            "replicas": "the gradients of its several replicas were measured before they were summed: record it on one",
            "micro-batches": "the gradients of its micro-batches were measured before they were summed: record it with "
            "accumulate=1",
            "weights": f"not the gradients of all weights were measured: record it with {watch} and with the kind "
            "weight_gradients",
        }
        lacks = run.lacks or (() if weights else ("weights",))
        if lacks or run.tensors is None:
            raise LoopError(f"{self.name}: the largest gradient of a step (amax) is not in it: {reasons[lacks[0]]}.")
        seen = run.tensors.at(self.step)[:, weights].max(axis=1)
        known = self.applied & np.isfinite(seen)
        return np.where(known, np.where(known, seen, 0) / self.scale.astype(np.float32), 0).astype(np.float32)

    @functools.cached_property
    def below(self) -> np.ndarray:
        """Int64 [steps, octaves + 1]: how many gradients of weights lie below each octave from `LEAST` to `MOST`.

        Zeros are below the first octave, infinities and NaN in the last, whose end is the total.

        Raises:
            LoopError: If a step has no histogram of the gradients of the weights.
        """
        seen, (row, tensor, place, values) = self.run.tensors, self.entries
        names = seen.names if seen else ()
        weights = np.array([name.startswith("weight_gradients/") for name in names], bool)
        kept = weights[tensor]
        missing = np.setdiff1d(np.arange(len(self.step)), row[kept])
        if len(missing):
            raise LoopError(
                f"{self.name}: {len(missing)} of {len(self.step)} steps have no histogram of the weights' "
                f"gradients, the first of them step {self.step[missing[0]]}. Record one at each step: hs.Trace(path, "
                "every=1) and hs.observe.watch(model), or halfstep train --trace 1."
            )
        counts = np.zeros([len(self.step), MOST - LEAST + 1], np.int64)
        # The bins are zeros, then the octaves, then infinities and NaN.
        np.add.at(counts, (row[kept], np.minimum(place[kept], scaler.observe.INFINITY)), values[kept])
        return np.cumsum(counts, axis=1)

    @functools.cached_property
    def _gradients(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The entries of all gradients that carry the loss scale and are finite: [entries].

        The index of the step; the largest magnitude of the bin, at the recorded scale, 0 for zeros; the largest
        magnitude that the format rounds to zero; and the number of values.
        """
        (row, tensor, place, values), seen = self.entries, self.run.tensors
        if seen is None or not len(row):
            return row, np.zeros(0), np.zeros(0), np.zeros(0)
        kept = seen.carries_scale[tensor] & (place < scaler.observe.INFINITY)
        row, tensor, place, values = row[kept], tensor[kept], place[kept], values[kept]
        forms = [scaler.float_format(name) for name in seen.formats]
        zero, epsilon, smallest = (
            np.array([getattr(form, name) for form in forms], np.float64)[tensor]
            for name in ("zero_threshold", "epsilon", "smallest_subnormal")
        )
        exponent = place - scaler.observe.bin_of(0)
        apart = np.maximum(np.ldexp(epsilon, exponent), smallest)
        largest = np.where(place == scaler.observe.ZERO, 0.0, np.ldexp(1.0, exponent + 1) - apart)
        return row, largest, zero, values.astype(np.float64)

    def lost(self, scales: np.ndarray, skipped: np.ndarray, since: int = 0) -> Lost:
        """How many values would be zero at these scales, over the steps that are not skipped, from an index on.

        Args:
            scales: Float32 [steps], the replayed scales.
            skipped: Bool [steps].
            since: The index of the first step that counts.
        """
        row, largest, least, values = self._gradients
        applied = ~skipped[row] & (row >= since)
        moved = scales.astype(np.float64) / self.scale
        zero = applied & (largest > 0) & (largest * moved[row] <= least)
        return Lost(float(values[zero].sum()), float(values[applied].sum()))


def recording_of(trace: TraceTables | Recorded, name: str) -> Recording:
    """The recorded steps of a trace.

    Raises:
        LoopError: If the trace has no step, or lacks its loss scales, its decisions or the largest gradients.
    """
    run = as_recorded(trace)
    if not len(run):
        raise LoopError(f"{name}: it has no step. Let the run take some.")
    record = f"hs.Trace and {probes_for(run.parts)}{'' if run.parts else ', as halfstep train --trace does it'}"
    scale = run.column("loss_scale")
    if np.isnan(scale).any() or "applied" not in run.columns:
        if run.parts and np.isnan(scale).all():
            raise LoopError(
                f"{name}: it is a trace of a ComposedStep whose parts {', '.join(run.parts)} have a loss scaler "
                "each, so that the step has no loss scale that another strategy could have set. To replay it, give the "
                f"ComposedStep one scaler, forward= and loss_scaler=, and record it with {record}."
            )
        missing = "loss_scale" if np.isnan(scale).any() else "applied"
        raise LoopError(f"{name}: its steps have no {missing}. Have the train step return it, or record with {record}.")
    low = run.column("critical_low")
    unseen = int(np.isnan(low).sum())
    if 0 < unseen < len(low):
        raise LoopError(
            f"{name}: {unseen:,} of its {len(low):,} steps were not measured, as with watch(every=10), and have no "
            f"critical scale. A replay needs that of each step. Record it with {record}."
        )
    if np.isnan(low).any() or np.isposinf(low).all():
        raise LoopError(
            f"{name}: it has no critical scales, because no gradients were measured. Without them it is unknown what "
            f"another scale would have done. Record it with {record}."
        )
    attempted, applied = run.attempted, run.column("applied") != 0
    if not attempted.any():
        raise LoopError(f"{name}: none of its {len(run)} micro-batches ended a window. Let the run take more.")
    of_loss = ~applied & (run.cause == "LOSS")
    step, scale, applied, of_loss = (values[attempted] for values in (run.step, scale, applied, of_loss))
    return Recording(name, run, step, scale, applied, of_loss, _limits_of(run))


def _overflows_at(run: Recorded) -> np.ndarray:
    """The smallest scale at which the largest gradient of each step is infinite, in the trace's format."""
    tensors = run.tensors
    if tensors is None:
        return np.full(len(run), np.inf)
    seen, found = tensors.at(run.step), np.full(len(run), np.inf)
    for place in np.flatnonzero(tensors.carries_scale).tolist():
        one = seen[:, place].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            at = scaler.float_format(tensors.formats[place]).overflow_threshold * (run.column("loss_scale") / one)
        found = np.fmin(found, np.where(np.isfinite(one) & (one > 0), at, np.inf))
    return found


class _Limits(NamedTuple):
    """The limits of each step: float32 [steps].

    Attributes:
        decided: At a scale above it, the step counts as skipped.
        finite_to: At scales up to it, the step would certainly have been finite.
        skips_from: At a scale above it, the step would certainly have been skipped.
    """

    decided: np.ndarray
    finite_to: np.ndarray
    skips_from: np.ndarray


def _limits_of(run: Recorded) -> _Limits:
    """The limits of each attempted step; those of a window are the lowest of its micro-batches.

    Each step has one limit: at a scale above it, the replayed step is skipped. A step that was applied at the scale S
    is finite at S and below. Above S, its critical scale decides, and between two powers of two the largest measured
    gradient. If the critical scale is an interval, its lower end counts: a gradient of unknown format is assumed to be
    narrow. A step that was skipped at S is skipped at S and above. Below S it is assumed to be finite, unless no scale
    helps its cause. A spike was finite at S: a strategy that is replayed is no guard, and would have applied it.
    """
    scale, low, high = (run.column(name) for name in ("loss_scale", "critical_low", "critical_high"))
    attempted = run.attempted
    applied = (run.column("applied") != 0) | (attempted & (run.cause == "SPIKE"))
    known = low > 0
    past = _below(2 * high)
    measured = _below(_overflows_at(run))
    decided = np.where(known, np.clip(measured, low, _below(2 * low)), past)
    # An infinite activation in an applied step, such as that of a mask, does not limit the scale.
    spared = ~known & _of_window(applied, attempted)
    decided, past = np.where(spared, measured, decided), np.where(spared, np.inf, past)
    exact = known & (low == high)
    finite_to = np.where(exact, np.maximum(low, decided * (1 - _ROUNDING)), low)
    skips_from = np.where(exact, np.minimum(past, decided * (1 + _ROUNDING)), past)
    rows = [_by_window(values, attempted) for values in (decided, finite_to, skips_from)]
    scale, applied = scale[attempted], applied[attempted]
    # The decision at the step's own scale is certain, whatever was measured.
    lower, upper = np.where(applied, scale, 0.0), np.where(applied, np.inf, _below(scale))
    hopeless = ~applied & np.isin(run.cause[attempted], _HOPELESS)
    decided, finite_to, skips_from = (np.minimum(np.maximum(values, lower), upper) for values in rows)
    finite_to = np.where(applied, finite_to, 0.0)
    return _Limits(*(_float32(np.where(hopeless, 0.0, values)) for values in (decided, finite_to, skips_from)))


def _by_window(values: np.ndarray, attempted: np.ndarray) -> np.ndarray:
    """The minimum over each window: the micro-batches up to and including the attempted one."""
    ends = np.flatnonzero(attempted)
    if not len(ends):
        return np.zeros(0)
    return np.minimum.reduceat(values[: ends[-1] + 1], np.concatenate([[0], ends[:-1] + 1]))


def _of_window(applied: np.ndarray, attempted: np.ndarray) -> np.ndarray:
    """For each micro-batch whether its window was applied; false after the last complete window."""
    ends = np.append(np.flatnonzero(attempted), len(applied))
    return np.append(applied, False)[ends[np.searchsorted(ends, np.arange(len(applied)))]]


def _below(scale: np.ndarray) -> np.ndarray:
    """The largest float32 number below each scale, at most 2^127, the largest loss scale."""
    kept = np.minimum(scale, 2.0**127).astype(np.float32)
    return np.where(kept >= scale, np.nextafter(kept, np.float32(0)), kept).astype(np.float64)


def _float32(scale: np.ndarray) -> np.ndarray:
    """Rounds down to float32, since limits are compared with float32 scales."""
    kept = np.minimum(scale, _LARGEST).astype(np.float32)
    return np.where(kept > scale, np.nextafter(kept, np.float32(0)), kept)
