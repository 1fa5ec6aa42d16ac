"""The attempted steps of a trace as arrays, and the largest loss scale at which each would have been finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import scaler
from loops.record.trace import TraceTables
from loops.record.watching import probes_for
from loops.support.errors import LoopError

_HOPELESS = ("LOSS", "BACKWARD", "TOO_LARGE", "UPDATE")
"""Causes of a skip that no loss scale helps, by the names of `scaler.Cause`."""
_ROUNDING = 2.0**-10
"""The relative error of a measured magnitude, which was rounded to float16 or bfloat16."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Recording:
    """The attempted steps of a trace.

    Attributes:
        name: The name of the trace, for messages.
        tables: The trace.
        step: Int64 [steps], the steps' numbers.
        scale: Float64 [steps], the recorded loss scales.
        applied: Bool [steps].
        of_loss: Bool [steps], whether they were skipped because their loss was not finite.
        limits: The scales up to which the steps would have been finite.
    """

    name: str
    tables: TraceTables
    step: np.ndarray
    scale: np.ndarray
    applied: np.ndarray
    of_loss: np.ndarray
    limits: _Limits


def recording_of(tables: TraceTables, name: str) -> Recording:
    """The recorded steps of a trace.

    Raises:
        LoopError: If the trace has no step, or lacks its loss scales, its decisions or the largest gradients.
    """
    steps = tables.steps
    if not len(steps):
        raise LoopError(f"{name}: it has no step. Let the run take some.")
    record = _how_to_record(tables.parts)
    scale = _numbers(steps, "loss_scale")
    if np.isnan(scale).any() or not steps["applied"].null_count < len(steps):
        if tables.parts and np.isnan(scale).all():
            raise LoopError(
                f"{name}: it is a trace of a ComposedStep whose parts {', '.join(tables.parts)} have a loss scaler "
                "each, so that the step has no loss scale that another strategy could have set. To replay it, give the "
                f"ComposedStep one scaler, forward= and loss_scaler=, and record it with {record}."
            )
        missing = "loss_scale" if np.isnan(scale).any() else "applied"
        raise LoopError(f"{name}: its steps have no {missing}. Have the train step return it, or record with {record}.")
    low, high = _numbers(steps, "critical_low"), _numbers(steps, "critical_high")
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
    applied = _flags(steps, "applied", True)
    attempted = _flags(steps, "attempted", True)
    if not attempted.any():
        raise LoopError(f"{name}: none of its {len(steps)} micro-batches ended a window. Let the run take more.")
    causes = np.array(steps["cause"].to_pylist(), object) if steps["cause"].null_count < len(steps) else _none(len(low))
    limits = _limits_of(_Seen(scale, applied, attempted, causes, low, high, _overflows_at(tables, scale)))
    number, of_loss = steps["step"].to_numpy(), ~applied & (causes == "LOSS")
    return Recording(name, tables, number[attempted], scale[attempted], applied[attempted], of_loss[attempted], limits)


def _how_to_record(parts: Sequence[str]) -> str:
    """How to record what a replay needs."""
    by_command = "" if parts else ", as halfstep train --trace does it"
    return f"hs.Trace and {probes_for(parts)}{by_command}"


def largest_gradient(recording: Recording) -> np.ndarray:
    """The largest unscaled gradient of a weight at each step, see `Event.amax`: float32 [steps].

    It is 0 for a skipped step, where it is unknown; a strategy takes 0 for no information.

    Raises:
        LoopError: If the trace does not have it.
    """
    tables = recording.tables
    names = [name for name in tables.steps.column_names if name.startswith("amax/weight_gradients/")]
    watch = f"{probes_for(tables.parts)}, of all layers"
    reasons = {
        "replicas": "the gradients of its several replicas were measured before they were summed: record it on one",
        "micro-batches": "the gradients of its micro-batches were measured before they were summed: record it with "
        "accumulate=1",
        "weights": f"not the gradients of all weights were measured: record it with {watch} and with the kind "
        "weight_gradients",
    }
    lacks = tables.lacks or (() if names else ("weights",))
    if lacks:
        raise LoopError(f"{recording.name}: the largest gradient of a step (amax) is not in it: {reasons[lacks[0]]}.")
    seen = np.stack([tables.steps[name].to_numpy() for name in names]).max(axis=0)
    seen = seen[_flags(tables.steps, "attempted", True)]
    known = recording.applied & np.isfinite(seen)
    return np.where(known, np.where(known, seen, 0) / recording.scale.astype(np.float32), 0).astype(np.float32)


def _overflows_at(tables: TraceTables, scale: np.ndarray) -> np.ndarray:
    """The smallest scale at which the largest gradient of each row is infinite, in the trace's format."""
    found = np.full(len(scale), np.inf)
    for tensor in tables.tensors.to_pylist():
        if tensor["carries_scale"]:
            seen = tables.steps[f"amax/{tensor['name']}"].to_numpy().astype(np.float64)
            with np.errstate(divide="ignore", invalid="ignore"):
                at = scaler.float_format(tensor["format"]).overflow_threshold * (scale / seen)
            found = np.fmin(found, np.where(np.isfinite(seen) & (seen > 0), at, np.inf))
    return found


def _numbers(table: Any, name: str) -> np.ndarray:
    """A column of numbers as float64, with NaN for null."""
    return table[name].to_numpy().astype(np.float64)


def _flags(table: Any, name: str, missing: bool) -> np.ndarray:
    return table[name].fill_null(missing).to_numpy().astype(bool)


def _none(count: int) -> np.ndarray:
    return np.full(count, None, object)


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


class _Seen(NamedTuple):
    """The rows of a trace: attempted steps and micro-batches, as arrays [rows].

    Attributes:
        scale: Float64, the loss scale.
        applied: Bool; false for a micro-batch that does not end a window.
        attempted: Bool.
        causes: Names of a `scaler.Cause`, or None.
        low: Float64, the lower bound of the critical scale.
        high: Float64, the upper bound of the critical scale.
        overflows_at: Float64, the smallest scale at which the largest measured gradient is infinite; infinity for none.
    """

    scale: np.ndarray
    applied: np.ndarray
    attempted: np.ndarray
    causes: np.ndarray
    low: np.ndarray
    high: np.ndarray
    overflows_at: np.ndarray


def _limits_of(seen: _Seen) -> _Limits:
    """The limits of each attempted step; those of a window are the lowest of its micro-batches.

    Each step has one limit: at a scale above it, the replayed step is skipped. A step that was applied at the scale S
    is finite at S and below. Above S, its critical scale decides, and between two powers of two the largest measured
    gradient. If the critical scale is an interval, its lower end counts: a gradient of unknown format is assumed to be
    narrow. A step that was skipped at S is skipped at S and above. Below S it is assumed to be finite, unless no scale
    helps its cause. A spike was finite at S: a strategy that is replayed is no guard, and would have applied it.
    """
    seen = seen._replace(applied=seen.applied | (seen.attempted & (seen.causes == "SPIKE")))
    known = seen.low > 0
    past = _below(2 * seen.high)
    measured = _below(seen.overflows_at)
    decided = np.where(known, np.clip(measured, seen.low, _below(2 * seen.low)), past)
    # An infinite activation in an applied step, such as that of a mask, does not limit the scale.
    spared = ~known & _of_window(seen.applied, seen.attempted)
    decided, past = np.where(spared, measured, decided), np.where(spared, np.inf, past)
    exact = known & (seen.low == seen.high)
    finite_to = np.where(exact, np.maximum(seen.low, decided * (1 - _ROUNDING)), seen.low)
    skips_from = np.where(exact, np.minimum(past, decided * (1 + _ROUNDING)), past)
    rows = [_by_window(values, seen.attempted) for values in (decided, finite_to, skips_from)]
    scale, applied = seen.scale[seen.attempted], seen.applied[seen.attempted]
    # The decision at the step's own scale is certain, whatever was measured.
    lower, upper = np.where(applied, scale, 0.0), np.where(applied, np.inf, _below(scale))
    hopeless = ~applied & np.isin(seen.causes[seen.attempted], _HOPELESS)
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
