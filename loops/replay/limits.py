"""Up to which loss scale a recorded step would have been finite.

Each step has one limit: replayed above it, the step is skipped. A step that was applied at the scale S is finite at S
and below. Above, its critical scale decides, and between two powers of two the largest gradient that was measured.
Where the critical scale is an interval its lower end counts, which takes a gradient of unknown format for a narrow one.
A step that was skipped at S is skipped at S and above; below it is taken for finite, though nobody saw it, unless its
cause is one that no scale helps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_HOPELESS = ("LOSS", "BACKWARD", "TOO_LARGE", "UPDATE")
"""Causes of a skip that no loss scale helps, by the names of `scaler.Cause`."""
_ROUNDING = 2.0**-10
"""By how much, as a share, a measured magnitude may differ from the true one: float16 and bfloat16 rounded it."""
_LARGEST = float(np.finfo(np.float32).max)


class Limits(NamedTuple):
    """For each step, float32 [steps]; a scale above one of them is beyond it.

    Attributes:
        decided: Above it the step counts as skipped.
        finite_to: Up to it the step would certainly have been finite.
        skips_from: Above it the step would certainly have been skipped.
    """

    decided: np.ndarray
    finite_to: np.ndarray
    skips_from: np.ndarray


class Seen(NamedTuple):
    """What a trace says of each step that was attempted, and of each micro-batch: arrays [rows].

    Attributes:
        scale: Float64, the loss scale.
        applied: Bool; of a micro-batch that ends no window, false.
        attempted: Bool.
        causes: Names of a `scaler.Cause`, or None.
        low: Float64, the critical scale at least.
        high: Float64, the critical scale at most.
        overflows_at: Float64, the scale from which on the largest measured gradient is infinite; infinity for none.
    """

    scale: np.ndarray
    applied: np.ndarray
    attempted: np.ndarray
    causes: np.ndarray
    low: np.ndarray
    high: np.ndarray
    overflows_at: np.ndarray


def limits_of(seen: Seen) -> Limits:
    """The limits of each attempted step: those of its micro-batch that overflows first."""
    known = seen.low > 0
    past = _below(2 * seen.high)
    measured = _below(seen.overflows_at)
    decided = np.where(known, np.clip(measured, seen.low, _below(2 * seen.low)), past)
    # An infinite activation that spoils nothing, such as that of a mask, says nothing of gradients.
    spared = ~known & _of_window(seen.applied, seen.attempted)
    decided, past = np.where(spared, measured, decided), np.where(spared, np.inf, past)
    exact = known & (seen.low == seen.high)
    finite_to = np.where(exact, np.maximum(seen.low, decided * (1 - _ROUNDING)), seen.low)
    skips_from = np.where(exact, np.minimum(past, decided * (1 + _ROUNDING)), past)
    rows = [_by_window(values, seen.attempted) for values in (decided, finite_to, skips_from)]
    scale, applied = seen.scale[seen.attempted], seen.applied[seen.attempted]
    # What happened at the scale of the step is certain, whatever was measured.
    lower, upper = np.where(applied, scale, 0.0), np.where(applied, np.inf, _below(scale))
    hopeless = ~applied & np.isin(seen.causes[seen.attempted], _HOPELESS)
    decided, finite_to, skips_from = (np.minimum(np.maximum(values, lower), upper) for values in rows)
    finite_to = np.where(applied, finite_to, 0.0)
    return Limits(*(_float32(np.where(hopeless, 0.0, values)) for values in (decided, finite_to, skips_from)))


def _by_window(values: np.ndarray, attempted: np.ndarray) -> np.ndarray:
    """The least of each window: of the micro-batches up to and with the one that is attempted."""
    ends = np.flatnonzero(attempted)
    if not len(ends):
        return np.zeros(0)
    return np.minimum.reduceat(values[: ends[-1] + 1], np.concatenate([[0], ends[:-1] + 1]))


def _of_window(applied: np.ndarray, attempted: np.ndarray) -> np.ndarray:
    """For each micro-batch whether its window was applied; false after the last whole window."""
    ends = np.append(np.flatnonzero(attempted), len(applied))
    return np.append(applied, False)[ends[np.searchsorted(ends, np.arange(len(applied)))]]


def _below(scale: np.ndarray) -> np.ndarray:
    """The largest float32 number below each: up to 2^127, beyond which no loss scale is."""
    kept = np.minimum(scale, 2.0**127).astype(np.float32)
    return np.where(kept >= scale, np.nextafter(kept, np.float32(0)), kept).astype(np.float64)


def _float32(scale: np.ndarray) -> np.ndarray:
    """As float32, rounded down, since a limit is compared with float32 scales."""
    kept = np.minimum(scale, _LARGEST).astype(np.float32)
    return np.where(kept > scale, np.nextafter(kept, np.float32(0)), kept)
