"""The heat map of exponents: the largest magnitude of each tensor over the steps, and the histograms behind it."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import scaler
from loops.record.steps import Measured, Recorded
from loops.record.summary import number
from loops.support.pages import Table
from loops.support.text import amount
from loops.views.chart import FIRST, LOWEST, heat_cells, sampled
from loops.views.report.tables import cell
from scaler import observe

_TENSORS, _TABLE = 1500, 300
_OCTAVES = 16
"""A byte of a histogram holds shares down to 2^-16; smaller ones are raised to that."""


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """What `page.js` draws.

    Attributes:
        alt: What it shows, in words.
        data: The data that the script draws.
        said: The end of the caption.
        numbers: The table of its values.
    """

    alt: str
    data: Mapping[str, Any]
    said: str
    numbers: Table


def heat_map(run: Recorded, columns: int, budget: int) -> HeatMap | None:
    """The heat map of a run; None if no tensor was measured.

    Args:
        run: The run.
        columns: The most columns of the map.
        budget: The most bytes of its histograms.
    """
    measured = run.tensors
    if measured is None or not len(measured.step):
        return None
    kept = _kept(measured)
    starts, cells = heat_cells(measured, kept, columns)
    payload = {
        "tensors": [_described(measured, place) for place in kept.tolist()],
        "formats": {name: _limits(name) for name in sorted({measured.formats[place] for place in kept.tolist()})},
        "starts": starts.tolist(),
        "last": int(measured.step[-1]),
        "cells": _as_text(cells),
        "first": FIRST,
        "lowest": LOWEST,
        "octaves": _OCTAVES,
        **_histograms_of(measured, kept, budget, run),
    }
    said = f"Shown are {len(kept):,} of {len(measured.names):,} tensors." if len(kept) < len(measured.names) else ""
    shown, steps = amount(len(kept), "tensor"), amount(len(measured.step), "step")
    alt = f"Heat map of the exponents of {shown} over {steps}. " + _worst(measured)
    return HeatMap(alt, payload, said, _table(measured, kept))


def _kept(measured: Measured) -> np.ndarray:
    """Indices of the tensors to show, in order: if there are too many, those nearest to overflow."""
    if len(measured.names) <= _TENSORS:
        return np.arange(len(measured.names))
    with np.errstate(invalid="ignore", divide="ignore"):
        room = np.log2(measured.amax).max(axis=0) - np.array([_limits(name)["high"] for name in measured.formats])
    return np.sort(np.argsort(-np.nan_to_num(room, nan=np.inf))[:_TENSORS])


def _described(measured: Measured, place: int) -> list[Any]:
    kind, _, layer = measured.names[place].partition("/")
    return [kind, layer or kind, measured.formats[place], bool(measured.carries_scale[place])]


def _limits(name: str) -> dict[str, Any]:
    limits = scaler.float_format(name)
    return {
        "low": math.log2(limits.smallest_subnormal),
        "normal": math.log2(limits.smallest_normal),
        "high": math.log2(limits.max),
        "largest": f"{limits.max:g}" if limits.max < 1e6 else number(2.0 ** math.ceil(math.log2(limits.max))),
    }


def _worst(measured: Measured) -> str:
    broken = ~np.isfinite(measured.amax)
    if not broken.any():
        return "All of it is finite."
    step = int(np.flatnonzero(broken.any(axis=1))[0])
    name = measured.names[int(np.flatnonzero(broken[step])[0])]
    return f"Not all of it is finite; the first at step {int(measured.step[step])} is {name}."


def _table(measured: Measured, kept: np.ndarray) -> Table:
    rows = []
    for place in kept[:_TABLE].tolist():
        values = measured.amax[~measured.missing[:, place], place]
        finite = values[np.isfinite(values)]
        usable = finite[finite > 0]
        with np.errstate(divide="ignore"):
            least, most = (
                f"{np.log2(one):.1f}" if len(usable) else None
                for one in (usable.min(initial=np.inf), usable.max(initial=0))
            )
        lost = int((~np.isfinite(values)).sum())
        rows.append(
            [
                measured.names[place],
                measured.formats[place],
                cell(least),
                cell(most),
                cell(int((finite == 0).sum())),
                cell(lost),
            ]
        )
    said = "log2 of the largest magnitude of each tensor: the least and the greatest over the steps"
    said += f"; {_TABLE} of {len(kept):,} tensors" if len(kept) > _TABLE else ""
    return Table(["tensor", "format", "least", "greatest", "steps all zero", "steps not finite"], rows, said)


def _histograms_of(measured: Measured, kept: np.ndarray, budget: int, run: Recorded) -> dict[str, Any]:
    """The histograms that fit, each a byte for the share of the values in each bin: 255 + 254 / `_OCTAVES` * log2.

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
        levels = np.where(shares > 0, np.maximum(1, np.round(255 + 254 / _OCTAVES * np.log2(shares))), 0)
    return {"frames": frames.tolist(), "bars": _as_text(levels.astype(np.uint8)), "low": low, "bins": bins}


def _chosen(frames: np.ndarray, skips: np.ndarray, room: int) -> np.ndarray:
    """Frames that fit: half of them evenly spaced, the rest at the first skips."""
    if len(frames) <= room:
        return frames
    even = frames[sampled(len(frames), max(1, room - room // 2))]
    around = np.setdiff1d(np.intersect1d(frames, skips), even)[: room - len(even)]
    return np.union1d(even, around)


def _as_text(values: np.ndarray) -> str:
    """Bytes as base64 text, for JSON."""
    return base64.b64encode(np.ascontiguousarray(values, np.uint8).tobytes()).decode("ascii")
