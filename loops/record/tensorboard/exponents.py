"""What TensorBoard shows of a step's probes: the headroom as curves, and a histogram of exponents for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loops.loop.visit import Visit
from loops.record.trace.measured import margins
from loops.record.trace.tensors import Tensor
from scaler import observe

METADATA = tf.compat.v1.SummaryMetadata(plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms"))
"""What tells TensorBoard that an array [bins, 3] is a histogram: its columns are left edge, right edge and count."""


class Histogram(NamedTuple):
    """The values of a tensor at a step.

    Attributes:
        step: Its number.
        name: Of the curve.
        bins: Float64 [bins, 3]: the exponents from and to, and how many values; without zeros, infinities and NaN.
    """

    step: int
    name: str
    bins: np.ndarray


def headroom_curves(visit: Visit, rows: Sequence[int], tensors: Sequence[Tensor]) -> list[tuple[int, str, float]]:
    """The octaves that are left at some steps, as points (step, curve, value); none where it is not known.

    Args:
        visit: With the vector `amax`.
        rows: Places in it.
        tensors: What was measured.
    """
    chosen = list(rows)
    if not chosen:
        return []
    scale = np.asarray(visit.outputs.get("loss_scale", np.ones(len(visit.vectors["amax"]))), np.float64)[chosen]
    found = margins(visit.vectors["amax"][chosen], scale, tensors)
    low, high = found.critical
    with np.errstate(divide="ignore"):
        of_gradients = np.log2(np.where(low > 0, low, high)) - np.log2(scale)
    curves: Mapping[str, np.ndarray] = {"scaler/headroom": of_gradients, "activations/headroom": found.headroom}
    return [
        (visit.first + row, name, float(values[place]))
        for place, row in enumerate(chosen)
        for name, values in curves.items()
        if np.isfinite(values[place])
    ]


def histograms(visit: Visit, rows: Sequence[int], tensors: Sequence[Tensor]) -> list[Histogram]:
    """The histogram of each tensor at the last of some steps that counted.

    Args:
        visit: With the vector `counts`.
        rows: Places in it.
        tensors: What was measured.
    """
    counts = visit.vectors["counts"]
    counted = [row for row in rows if counts[row].any()]
    if not counted:
        return []
    step = visit.first + counted[-1]
    first, end = observe.bin_of(observe.LOWEST), observe.INFINITY
    found = []
    for tensor, bins in zip(tensors, counts[counted[-1]], strict=True):
        inside = np.flatnonzero(bins[first:end])
        if len(inside):
            exponents = np.arange(inside[0], inside[-1] + 1)
            edges = exponents + observe.LOWEST
            table = np.stack([edges, edges + 1, bins[first:end][exponents]], axis=1).astype(np.float64)
            found.append(Histogram(step, f"exponents/{tensor.name}", table))
    return found
