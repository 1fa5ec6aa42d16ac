"""What TensorBoard shows of probes: the headroom as curves, and a histogram of exponents for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loops.loop.visit import Visit
from loops.record.columns import octaves_to_critical
from loops.record.trace.tensors import tensors_of_watch
from loops.record.trace.visit_columns import margins, measured
from loops.step.watched import Watched, watched_by
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


def headroom_curves(visit: Visit, rows: Sequence[int], train_step: Any) -> list[tuple[int, str, float]]:
    """The headroom at some steps in octaves, as points (step, curve, value); without those that are unknown.

    Args:
        visit: A visit of the step, with what its probes measured.
        rows: The indices of the steps in it.
        train_step: The step. Each part of a `ComposedStep` has curves of its own.
    """
    seen = measured(visit, train_step)
    return [
        point
        for place, one in enumerate(watched_by(train_step))
        for point in _curves(visit, [row for row in rows if seen[row, place]], one)
    ]


def _curves(visit: Visit, chosen: list[int], watched: Watched) -> list[tuple[int, str, float]]:
    if not chosen:
        return []
    amax = visit.vectors[watched.output("amax")]
    scale = np.asarray(visit.outputs.get(watched.output("loss_scale"), np.ones(len(amax))), np.float64)[chosen]
    found = margins(amax[chosen], scale, tensors_of_watch(watched))
    of_gradients = octaves_to_critical(*found.critical, scale)
    curves: Mapping[str, np.ndarray] = {
        watched.output("scaler/headroom"): of_gradients,
        watched.output("activations/headroom"): found.headroom,
    }
    return [
        (visit.first + row, name, float(values[place]))
        for place, row in enumerate(chosen)
        for name, values in curves.items()
        if np.isfinite(values[place])
    ]


def histograms(visit: Visit, rows: Sequence[int], train_step: Any) -> list[Histogram]:
    """The histogram of each tensor at the last of some steps that has counts, of a part at the last that it has.

    Args:
        visit: A visit of the step, with what its probes measured.
        rows: The indices of the steps in it.
        train_step: The step.
    """
    watches = watched_by(train_step)
    return [found for one in watches for found in _histograms(visit, rows, one)]


def _histograms(visit: Visit, rows: Sequence[int], watched: Watched) -> list[Histogram]:
    counts, tensors = visit.vectors[watched.output("counts")], tensors_of_watch(watched)
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
