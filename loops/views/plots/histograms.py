"""The histogram of a tensor at a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import scaler
from loops.record import as_recorded
from loops.support.drawing import drawing
from loops.support.errors import LoopError
from loops.support.palette import BLUE, FAINT, MIDDLE, ORANGE
from scaler import observe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
