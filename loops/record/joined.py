"""Joins a run's log and its trace, each of which may have steps that the other lacks."""

from __future__ import annotations

import numpy as np

from loops.record.log import Log


def joined(trace: Log | None, log: Log | None) -> Log:
    """The steps of both, each once. Where both have a number, that of the trace counts, which tells NaN from infinity.

    Args:
        trace: The columns of the trace, or None if there is none.
        log: Those of the log, or None if there is none.
    """
    parts = [part for part in (trace, log) if part is not None and len(part.step)]
    if len(parts) < 2:
        return parts[0] if parts else Log(np.zeros(0, np.int64), {}, np.zeros(0, np.str_), 0)
    first, second = parts
    step = np.union1d(first.step, second.step)
    places = tuple(np.searchsorted(step, part.step) for part in parts)
    columns = {}
    for name in first.columns | second.columns:
        own, other = (_spread(part.columns.get(name), at, len(step)) for part, at in zip(parts, places, strict=True))
        columns[name] = np.where(np.isnan(own), other, own)
    causes = [np.full(len(step), "", max(part.cause.dtype for part in parts)) for _ in parts]
    for cause, part, at in zip(causes, parts, places, strict=True):
        cause[at] = part.cause
    return Log(step, columns, np.where(causes[0] == "", causes[1], causes[0]), 0)


def parts_at(trace: Log, log: Log) -> int | None:
    """The first step that both have with another finite number in one of their columns: then they are of two runs."""
    common, here, there = np.intersect1d(trace.step, log.step, return_indices=True)
    differs = np.zeros(len(common), bool)
    for name in ("loss", "loss_scale", "grad_norm"):
        if name in trace.columns and name in log.columns:
            one, other = trace.columns[name][here], log.columns[name][there]
            known = np.isfinite(one) & np.isfinite(other)
            differs |= known & ~np.isclose(one, np.where(known, other, 0.0), rtol=1e-6, atol=0.0)
    return int(common[differs][0]) if differs.any() else None


def _spread(values: np.ndarray | None, at: np.ndarray, length: int) -> np.ndarray:
    """The values at their places among all steps, and NaN at the others."""
    found = np.full(length, np.nan)
    if values is not None:
        found[at] = values
    return found
