"""How many of the recorded gradients would have been zero at another loss scale."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import scaler
from loops.replay.recording import Recording


class Counted(NamedTuple):
    """The gradients of the steps that have histograms, in entries of a step and a bin of one format.

    Attributes:
        row: Int64 [entries], the place of the step in the recording.
        largest: Float64 [entries], the largest magnitude of the bin, at the recorded scale; 0 for zeros.
        zero: Float64 [entries], up to where the format rounds to zero.
        values: Float64 [entries], how many values.
    """

    row: np.ndarray
    largest: np.ndarray
    zero: np.ndarray
    values: np.ndarray


class Lost(NamedTuple):
    """How many values would be zero, and of how many."""

    flushed: float
    values: float


def counted_in(recording: Recording) -> Counted:
    """The counts of all gradients that carry the loss scale."""
    table, tensors = recording.tables.histograms, recording.tables.tensors.to_pylist()
    carries = np.array([tensor["carries_scale"] for tensor in tensors], bool)
    forms = [scaler.float_format(tensor["format"]) for tensor in tensors]
    zero, epsilon, smallest = (
        np.array([getattr(form, name) for form in forms], np.float64)
        for name in ("zero_threshold", "epsilon", "smallest_subnormal")
    )
    tensor = table["tensor"].combine_chunks().indices.to_numpy() if len(table) else np.zeros(0, int)
    step, place, count = (table[name].to_numpy() for name in ("step", "bin", "count"))
    rows = np.searchsorted(recording.step, step)
    there = rows < len(recording.step)
    kept = there & (recording.step[np.where(there, rows, 0)] == step)
    kept &= carries[tensor] if len(tensors) else False
    kept &= place < scaler.observe.INFINITY
    tensor, exponent = tensor[kept], place[kept].astype(np.int64) - scaler.observe.bin_of(0)
    apart = np.maximum(np.ldexp(epsilon[tensor], exponent), smallest[tensor])
    largest = np.where(place[kept] == scaler.observe.ZERO, 0.0, np.ldexp(1.0, exponent + 1) - apart)
    return Counted(rows[kept], largest, zero[tensor], count[kept].astype(np.float64))


def lost(counted: Counted, recording: Recording, scales: np.ndarray, skipped: np.ndarray) -> Lost:
    """What of them would be zero at these scales, at the steps that are not skipped.

    Args:
        counted: Of this recording.
        recording: As from `recording_of`.
        scales: Float32 [steps], the replayed ones.
        skipped: Bool [steps].
    """
    applied = ~skipped[counted.row]
    moved = scales.astype(np.float64) / recording.scale
    zero = applied & (counted.largest > 0) & (counted.largest * moved[counted.row] <= counted.zero)
    return Lost(float(counted.values[zero].sum()), float(counted.values[applied].sum()))
