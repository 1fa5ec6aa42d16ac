"""The heat map of exponents: the largest magnitude of each tensor over the steps, and the histograms behind it."""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
from typing import Any

import numpy as np

import scaler
from loops.recorded.digest import number
from loops.recorded.run import Measured, Recorded
from loops.recorded.thin import sampled
from loops.report.figures import figure
from loops.report.tables import cell, table
from scaler import observe

NOTHING, ALL_ZERO, NOT_A_NUMBER, INFINITE = 0, 1, 2, 3
_FIRST = 4
"""The byte of the lowest exponent of a cell."""
_LOWEST, _HIGHEST = -123, 128
"""Exponents that a cell holds; those beyond are put at the ends."""
_OCTAVES = 16
"""A byte of a histogram holds shares down to 2^-16; a smaller one counts as that."""
_TENSORS, _TABLE = 1500, 300
_SAID = """The largest magnitude of each tensor, as a power of two, over the steps; where a column stands for several
steps, the largest of them. Blue is near the smallest, orange near the largest number of float16. Gradients are as they
were measured, times the loss scale. Point at a cell, or go to the map with Tab and move with the arrow keys: below are
its values and the histogram of that tensor nearest to that step."""


def heat_map(run: Recorded, columns: int, budget: int, key: str) -> str:
    """The figure of a run; "" where nothing was measured.

    Args:
        run: The run.
        columns: How many columns it may have.
        budget: Bytes that its histograms may take.
        key: What its elements are named by.
    """
    measured = run.tensors
    if measured is None or not len(measured.step):
        return ""
    kept = _kept(measured)
    edges = np.unique(np.linspace(0, len(measured.step), min(columns, len(measured.step)) + 1).astype(np.int64))
    cells = np.stack([_cells(measured.amax[start:end, kept]) for start, end in itertools.pairwise(edges)], 1)
    payload = {
        "tensors": [_described(measured, place) for place in kept.tolist()],
        "formats": {name: _limits(name) for name in sorted({measured.formats[place] for place in kept.tolist()})},
        "starts": measured.step[edges[:-1]].tolist(),
        "last": int(measured.step[-1]),
        "cells": _text(cells),
        "first": _FIRST,
        "lowest": _LOWEST,
        "octaves": _OCTAVES,
        **_histograms(measured, kept, budget, run),
    }
    said = _SAID + (
        f" Shown are {len(kept):,} of {len(measured.names):,} tensors." if len(kept) < len(measured.names) else ""
    )
    alt = f"Heat map of the exponents of {len(kept)} tensors over {len(measured.step):,} steps. " + _worst(measured)
    # A name may hold "</script>", and JSON leaves it as it is.
    data = json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")
    body = (
        f'<div class="heat" id="{key}"><div class="heat-top"></div><div class="heat-map"><div class="heat-rows" '
        f'aria-hidden="true"></div><div class="heat-area"><canvas tabindex="0" role="img" '
        f'aria-label="{html.escape(alt)}" aria-describedby="{key}-said"></canvas><div class="heat-mark" hidden>'
        "</div></div></div>"
        '<div class="heat-steps" aria-hidden="true"></div><div class="heat-legend"></div>'
        f'<div class="heat-said" id="{key}-said" aria-live="polite">This map needs JavaScript; the numbers are below.'
        f'</div><div class="heat-bars"></div><script type="application/json">{data}</script></div>'
    )
    return figure("Exponents by tensor and step", body, said, _table(measured, kept))


def _kept(measured: Measured) -> np.ndarray:
    """Places of the tensors to show, in their order: where there are too many, those nearest to an overflow."""
    if len(measured.names) <= _TENSORS:
        return np.arange(len(measured.names))
    with np.errstate(invalid="ignore"):
        room = _log2(measured.amax).max(axis=0) - np.array([_limits(name)["high"] for name in measured.formats])
    return np.sort(np.argsort(-np.nan_to_num(room, nan=np.inf))[:_TENSORS])


def _cells(amax: np.ndarray) -> np.ndarray:
    """A byte for each tensor, from float32 [steps, tensors]."""
    broken, infinite = np.isnan(amax).any(axis=0), np.isinf(amax).any(axis=0)
    largest = np.where(np.isfinite(amax), amax, 0.0).max(axis=0)
    _, exponent = np.frexp(largest)
    found = np.clip(exponent - 1, _LOWEST, _HIGHEST) - _LOWEST + _FIRST
    found = np.where(largest == 0, ALL_ZERO, found)
    found = np.where(infinite, INFINITE, found)
    return np.where(broken, NOT_A_NUMBER, found).astype(np.uint8)


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


def _histograms(measured: Measured, kept: np.ndarray, budget: int, run: Recorded) -> dict[str, Any]:
    """The frames that fit, each a byte for the share of the values in each bin."""
    numbers = measured.bin - observe.bin_of(0)
    inside = (measured.bin != observe.ZERO) & (measured.bin < observe.INFINITY)
    if not inside.any() or not len(kept):
        return {"frames": [], "bars": "", "low": 0, "bins": 0}
    low, high = max(int(numbers[inside].min()), -64), min(int(numbers[inside].max()), 63)
    bins = high - low + 1
    # Three fourths of what base64 writes are bytes.
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
    return {"frames": frames.tolist(), "bars": _text(levels.astype(np.uint8)), "low": low, "bins": bins}


def _chosen(frames: np.ndarray, skips: np.ndarray, room: int) -> np.ndarray:
    """Frames that fit: half of them evenly, and those of the first skips."""
    if len(frames) <= room:
        return frames
    even = frames[sampled(len(frames), max(1, room - room // 2))]
    around = np.setdiff1d(np.intersect1d(frames, skips), even)[: room - len(even)]
    return np.union1d(even, around)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, np.uint8).tobytes()).decode("ascii")


def _log2(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log2(values)


def _worst(measured: Measured) -> str:
    broken = ~np.isfinite(measured.amax)
    if not broken.any():
        return "All of it is finite."
    step = int(np.flatnonzero(broken.any(axis=1))[0])
    name = measured.names[int(np.flatnonzero(broken[step])[0])]
    return f"Not all of it is finite; the first at step {int(measured.step[step])} is {name}."


def _table(measured: Measured, kept: np.ndarray) -> str:
    rows = []
    for place in kept[:_TABLE].tolist():
        values = measured.amax[:, place]
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
                html.escape(measured.names[place]),
                html.escape(measured.formats[place]),
                cell(least),
                cell(most),
                cell(int((finite == 0).sum())),
                cell(lost),
            ]
        )
    said = "log2 of the largest magnitude of each tensor: the least and the greatest over the steps"
    said += f"; {_TABLE} of {len(kept):,} tensors" if len(kept) > _TABLE else ""
    return table(["tensor", "format", "least", "greatest", "steps all zero", "steps not finite"], rows, said)
