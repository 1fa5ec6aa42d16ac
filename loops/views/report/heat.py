"""The heat map of exponents: the largest magnitude of each tensor over the steps, and the histograms behind it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import scaler
from loops.record.run import Measured, Recorded
from loops.record.summary import number
from loops.support.pages import Table
from loops.support.text import amount
from loops.views.charts.cells import FIRST, LOWEST, heat_cells
from loops.views.report.bars import OCTAVES, as_text, histograms_of
from loops.views.report.tables import cell

_TENSORS, _TABLE = 1500, 300
_SAID = """The largest magnitude of each tensor, as a power of two, over the steps; where a column stands for several
steps, the largest of them. Blue is near the smallest, orange near the largest number of float16. Gradients are
as they were measured, times the loss scale. A cell is empty where nothing was measured, as between the turns of
a part. Point at a cell, or go to the map with Tab and move with the arrow keys: below are its values and the
histogram of that tensor nearest to that step."""


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """What `page.js` draws.

    Attributes:
        alt: What it shows, in words.
        data: The data that the script draws.
        said: The caption.
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
        "cells": as_text(cells),
        "first": FIRST,
        "lowest": LOWEST,
        "octaves": OCTAVES,
        **histograms_of(measured, kept, budget, run),
    }
    said = _SAID + (
        f" Shown are {len(kept):,} of {len(measured.names):,} tensors." if len(kept) < len(measured.names) else ""
    )
    shown, steps = amount(len(kept), "tensor"), amount(len(measured.step), "step")
    alt = f"Heat map of the exponents of {shown} over {steps}. " + _worst(measured)
    return HeatMap(alt, payload, said, _table(measured, kept))


def _kept(measured: Measured) -> np.ndarray:
    """Indices of the tensors to show, in order: if there are too many, those nearest to overflow."""
    if len(measured.names) <= _TENSORS:
        return np.arange(len(measured.names))
    with np.errstate(invalid="ignore"):
        room = _log2(measured.amax).max(axis=0) - np.array([_limits(name)["high"] for name in measured.formats])
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
