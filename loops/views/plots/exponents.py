"""What probes counted by exponent: a heat map of all tensors, and the histogram of one at a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.record import as_recorded
from loops.support.drawing import drawing
from loops.support.errors import LoopError
from loops.support.palette import BLACK, BLUE, FAINT, HUGE, MIDDLE, ORANGE, PINK, TINY, YELLOW
from loops.views.charts.axis import ALL_ZERO, FIRST, INFINITE, LOWEST, NOT_A_NUMBER, NOT_MEASURED, heat_cells
from scaler import observe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = 400
_SPECIAL = ((ALL_ZERO, YELLOW, "all zero"), (NOT_A_NUMBER, PINK, "NaN"), (INFINITE, BLACK, "infinite"))
_LOW, _HIGH = -24, 16
"""float16's range in powers of two; the colours show how near its ends a value is."""


def exponents(run: Any, kind: str = "activation_gradients") -> Figure:
    """The largest magnitude of each tensor over the steps, as a power of two within float16's range.

    Blue is near the smallest number of float16, orange near its largest. Yellow is all zero, pink NaN, black infinite.
    Nothing is drawn where nothing was measured, as between the turns of a part.

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
    starts, cells = heat_cells(measured, np.array(chosen), _COLUMNS)
    with drawing(1.4 + 0.2 * len(chosen)) as figure:
        from matplotlib.colors import LinearSegmentedColormap, ListedColormap
        from matplotlib.patches import Patch

        axes = figure.subplots()
        axes.grid(False)
        steps, rows = np.append(starts, measured.step[-1] + 1), np.arange(len(chosen) + 1)
        colours = LinearSegmentedColormap.from_list("exponents", [TINY, MIDDLE, HUGE], _HIGH - _LOW)
        exponent = np.ma.masked_where(cells < FIRST, cells.astype(np.int64) - FIRST + LOWEST)
        mesh = axes.pcolormesh(steps, rows, exponent, cmap=colours, vmin=_LOW, vmax=_HIGH, rasterized=True)
        special = np.ma.masked_where((cells >= FIRST) | (cells == NOT_MEASURED), cells)
        tints = ListedColormap([colour for _, colour, _ in _SPECIAL])
        axes.pcolormesh(steps, rows, special, cmap=tints, vmin=_SPECIAL[0][0], vmax=_SPECIAL[-1][0], rasterized=True)
        named = [Patch(color=colour, label=label) for code, colour, label in _SPECIAL if (cells == code).any()]
        if named:
            figure.legend(handles=named, loc="outside upper left", ncols=len(named))
        names = [measured.names[place].partition("/")[2] for place in chosen]
        axes.set_yticks(np.arange(len(chosen)) + 0.5, names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("step")
        axes.set_title(kind.replace("_", " "), loc="left")
        bar = figure.colorbar(mesh, ax=axes, label="log2 of the largest magnitude", ticks=[-24, -14, 0, 16])
        bar.ax.set_yticklabels(["-24: smallest", "-14: smallest normal", "0", "16: infinite"])
        return figure


def histogram(run: Any, tensor: str, step: int | None = None) -> Figure:
    """The values of a tensor by exponent, with the range of its format shaded.

    Args:
        run: A run, in any form that `loops.views.plots` takes.
        tensor: The tensor's name, such as "activation_gradients/dense_1".
        step: The step; the nearest one with a histogram of this tensor is shown (default: the last).

    Raises:
        scaler.InvalidArgument: If `run` is not a run, or `tensor` was not measured.
        LoopError: Without matplotlib, or if the run has no histogram of this tensor.
    """
    found = as_recorded(run)
    measured = found.tensors
    if measured is None or not len(measured.frames):
        raise LoopError(f"{found.name}: it has no histograms. {' '.join(found.notes)}".rstrip())
    if tensor not in measured.names:
        raise scaler.InvalidArgument(f"histogram(tensor={tensor!r}): expected one of {', '.join(measured.names)}.")
    place = measured.names.index(tensor)
    # Of a part there are only histograms of its turns.
    frames = np.unique(measured.counted[measured.tensor == place])
    if not len(frames):
        raise LoopError(f"{found.name}: it has no histograms of {tensor}, only of others.")
    at = int(frames[-1] if step is None else frames[np.abs(frames - step).argmin()])
    mine = (measured.counted == at) & (measured.tensor == place)
    counts = np.bincount(measured.bin[mine], measured.count[mine], observe.BINS)
    limits = scaler.float_format(measured.formats[place])
    inside = counts[observe.bin_of(observe.LOWEST) : observe.INFINITY]
    edges = np.arange(observe.LOWEST, observe.LOWEST + len(inside) + 1)
    total = max(counts.sum(), 1.0)
    with drawing(2.6) as figure:
        axes = figure.subplots()
        low, normal, high = (np.log2(one) for one in (limits.smallest_subnormal, limits.smallest_normal, limits.max))
        axes.axvspan(low, high, color=MIDDLE, zorder=0)
        axes.axvline(normal, color=FAINT, linewidth=1.0)
        tints = np.where(edges[:-1] < normal, ORANGE, BLUE)
        axes.bar(edges[:-1] + 0.5, inside / total, width=0.9, color=tints)
        used = np.flatnonzero(inside)
        seen = edges[used] if len(used) else np.array([0])
        narrow = limits.name == "float16"
        axes.set_xlim(min(seen.min(), low if narrow else seen.min()) - 2, max(seen.max(), high if narrow else 0) + 3)
        special = {"zero": observe.ZERO, "infinite": observe.INFINITY, "NaN": observe.NAN}
        shares = ", ".join(f"{name} {counts[one] / total:.2%}" for name, one in special.items() if counts[one])
        axes.set_title(f"{tensor}, step {at}", loc="left", parse_math=False)
        axes.set_title(shares, loc="right")
        axes.set_xlabel(f"exponent (shaded: the range of {limits.name}; orange: subnormal)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("share of the values")
        return figure
