"""The histograms behind a heat map, as bytes that `page.js` reads."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from loops.record.run import Measured, Recorded
from loops.record.thin import sampled
from scaler import observe

OCTAVES = 16
"""A byte of a histogram holds shares down to 2^-16; smaller ones are raised to that."""


def histograms_of(measured: Measured, kept: np.ndarray, budget: int, run: Recorded) -> dict[str, Any]:
    """The histograms that fit, each a byte for the share of the values in each bin: 255 + 254 / `OCTAVES` * log2.

    Args:
        measured: The measured tensors of the run.
        kept: Indices of the tensors to show.
        budget: The most bytes of base64 text they may take.
        run: The run. Histograms of its skipped steps are kept first.

    Returns:
        `frames`, the steps with histograms; `bars`, uint8 [frames, tensors, bins + 3] in base64, where the last three
        are the shares of zeros, infinities and NaN; `low`, the exponent of the first bin; `bins`, the number of bins.
    """
    numbers = measured.bin - observe.bin_of(0)
    inside = (measured.bin != observe.ZERO) & (measured.bin < observe.INFINITY)
    if not inside.any() or not len(kept):
        return {"frames": [], "bars": "", "low": 0, "bins": 0}
    low, high = max(int(numbers[inside].min()), -64), min(int(numbers[inside].max()), 63)
    bins = high - low + 1
    # base64 writes four characters for three bytes.
    room = max(1, int(budget * 0.75) // (len(kept) * (bins + 3)))
    frames = _chosen(measured.frames, run.step[run.skipped], room)
    place_of = np.full(len(measured.names), -1)
    place_of[kept] = np.arange(len(kept))
    frame = np.searchsorted(frames, measured.counted).clip(0, len(frames) - 1)
    mine = (frames[frame] == measured.counted) & (place_of[measured.tensor] >= 0)
    column = np.select(
        [measured.bin == observe.ZERO, measured.bin == observe.INFINITY, measured.bin == observe.NAN],
        [bins, bins + 1, bins + 2],
        np.clip(numbers, low, high) - low,
    )
    counts = np.zeros([len(frames), len(kept), bins + 3])
    np.add.at(counts, (frame[mine], place_of[measured.tensor[mine]], column[mine]), measured.count[mine])
    shares = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1)
    with np.errstate(divide="ignore"):
        levels = np.where(shares > 0, np.maximum(1, np.round(255 + 254 / OCTAVES * np.log2(shares))), 0)
    return {"frames": frames.tolist(), "bars": as_text(levels.astype(np.uint8)), "low": low, "bins": bins}


def _chosen(frames: np.ndarray, skips: np.ndarray, room: int) -> np.ndarray:
    """Frames that fit: half of them evenly spaced, the rest at the first skips."""
    if len(frames) <= room:
        return frames
    even = frames[sampled(len(frames), max(1, room - room // 2))]
    around = np.setdiff1d(np.intersect1d(frames, skips), even)[: room - len(even)]
    return np.union1d(even, around)


def as_text(values: np.ndarray) -> str:
    """Bytes as base64 text, for JSON."""
    return base64.b64encode(np.ascontiguousarray(values, np.uint8).tobytes()).decode("ascii")
