"""The largest loss scale at which a recorded step would have been finite.

Each step has one limit: at a scale above it, the replayed step is skipped. A step that was applied at the scale S is
finite at S and below. Above S, its critical scale decides, and between two powers of two the largest measured gradient.
If the critical scale is an interval, its lower end counts: a gradient of unknown format is assumed to be narrow. A step
that was skipped at S is skipped at S and above. Below S it is assumed to be finite, unless no scale helps its cause.
A spike was finite at S: a strategy that is replayed is no guard, and would have applied it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_HOPELESS = ("LOSS", "BACKWARD", "TOO_LARGE", "UPDATE")
"""Causes of a skip that no loss scale helps, by the names of `scaler.Cause`."""
_ROUNDING = 2.0**-10
"""The relative error of a measured magnitude, which was rounded to float16 or bfloat16."""
_LARGEST = float(np.finfo(np.float32).max)


class Limits(NamedTuple):
    """The limits of each step: float32 [steps].

    Attributes:
        decided: At a scale above it, the step counts as skipped.
        finite_to: At scales up to it, the step would certainly have been finite.
        skips_from: At a scale above it, the step would certainly have been skipped.
    """

    decided: np.ndarray
    finite_to: np.ndarray
    skips_from: np.ndarray


class Seen(NamedTuple):
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


def limits_of(seen: Seen) -> Limits:
    """The limits of each attempted step; those of a window are the lowest of its micro-batches."""
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
    return Limits(*(_float32(np.where(hopeless, 0.0, values)) for values in (decided, finite_to, skips_from)))


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
