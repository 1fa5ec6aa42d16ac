"""The heat map of exponents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.record import as_recorded
from loops.support.drawing import drawing
from loops.support.errors import LoopError
from loops.support.palette import HUGE, MIDDLE, TINY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 400
_LOW, _HIGH = -24, 16
"""float16's range in powers of two; the colours show how near its ends a value is."""


def exponents(run: Any, kind: str = "activation_gradients") -> Figure:
    """The largest magnitude of each tensor over the steps, as a power of two within float16's range.

    Blue is near the smallest number of float16, orange near its largest; black is infinite or NaN, white all zero.

    Args:
        run: A run, in any form that `loops.views.plots` takes.
        kind: Which tensors: "activations", "activation_gradients", "weight_gradients", "weights", "updates", "slots".

    Raises:
        scaler.InvalidArgument: If `run` is not a run, or `kind` was not measured.
        LoopError: Without matplotlib, or if the run measured no tensors.
    """
    found = as_recorded(run)
    measured = found.tensors
    if measured is None or not len(measured.step):
        raise LoopError(f"{found.name}: no tensor was measured. {' '.join(found.notes)}".rstrip())
    chosen = [place for place, name in enumerate(measured.names) if name.startswith(f"{kind}/")]
    if not chosen:
        kinds = sorted({name.partition("/")[0] for name in measured.names})
        raise scaler.InvalidArgument(f"exponents(kind={kind!r}): expected one of {', '.join(kinds)}.")
    edges = np.unique(np.linspace(0, len(measured.step), min(_COLUMNS, len(measured.step)) + 1).astype(int))
    amax = measured.amax[:, chosen]
    # A NaN is larger than anything here, as an infinity is.
    largest = np.maximum.reduceat(np.where(np.isnan(amax), np.inf, amax), edges[:-1], axis=0).T
    with np.errstate(divide="ignore"):
        octaves = np.floor(np.log2(largest))
    with drawing(1.4 + 0.2 * len(chosen)) as figure:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        axes.grid(False)
        colours = LinearSegmentedColormap.from_list("exponents", [TINY, MIDDLE, HUGE], _HIGH - _LOW)
        steps = np.append(measured.step[edges[:-1]], measured.step[-1] + 1)
        shown = np.ma.masked_invalid(octaves)
        mesh = axes.pcolormesh(
            steps, np.arange(len(chosen) + 1), shown, cmap=colours, vmin=_LOW, vmax=_HIGH, rasterized=True
        )
        broken = np.ma.masked_where(~np.isposinf(octaves), np.zeros_like(octaves))
        dark = LinearSegmentedColormap.from_list("broken", ["black", "black"])
        axes.pcolormesh(steps, np.arange(len(chosen) + 1), broken, cmap=dark, rasterized=True)
        names = [measured.names[place].partition("/")[2] for place in chosen]
        axes.set_yticks(np.arange(len(chosen)) + 0.5, names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("step")
        axes.set_title(kind.replace("_", " "), loc="left")
        bar = figure.colorbar(mesh, ax=axes, label="log2 of the largest magnitude", ticks=[-24, -14, 0, 16])
        bar.ax.set_yticklabels(["-24: smallest", "-14: smallest normal", "0", "16: infinite"])
        return figure
