"""What TensorBoard shows of probes: the headroom as curves, and a histogram of exponents for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loops.loop.visit import Visit
from loops.record.columns import octaves_to_critical
from loops.record.trace.tensors import Tensor
from loops.record.trace.visit_columns import margins
from scaler import observe

METADATA = tf.compat.v1.SummaryMetadata(plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms"))
"""Marks an array [bins, 3] as a histogram for TensorBoard: its columns are left edge, right edge and count."""


class Histogram(NamedTuple):
    """The exponents of a tensor's values at a step.

    Attributes:
        step: The step's number.
        name: The curve's name.
        bins: Float64 [bins, 3]: left edge, right edge and count; without zeros, infinities and NaN.
    """

    step: int
    name: str
    bins: np.ndarray


def headroom_curves(visit: Visit, rows: Sequence[int], tensors: Sequence[Tensor]) -> list[tuple[int, str, float]]:
    """The headroom at some steps in octaves, as points (step, curve, value); without those that are unknown.

    Args:
        visit: A visit with the vector `amax`.
        rows: The indices of the steps in it.
        tensors: The measured tensors.
    """
    chosen = list(rows)
    if not chosen:
        return []
    scale = np.asarray(visit.outputs.get("loss_scale", np.ones(len(visit.vectors["amax"]))), np.float64)[chosen]
    found = margins(visit.vectors["amax"][chosen], scale, tensors)
    of_gradients = octaves_to_critical(*found.critical, scale)
    curves: Mapping[str, np.ndarray] = {"scaler/headroom": of_gradients, "activations/headroom": found.headroom}
    return [
        (visit.first + row, name, float(values[place]))
        for place, row in enumerate(chosen)
        for name, values in curves.items()
        if np.isfinite(values[place])
    ]


def histograms(visit: Visit, rows: Sequence[int], tensors: Sequence[Tensor]) -> list[Histogram]:
    """The histogram of each tensor at the last of some steps that has counts.

    Args:
        visit: A visit with the vector `counts`.
        rows: The indices of the steps in it.
        tensors: The measured tensors.
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
