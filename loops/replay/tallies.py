"""How many gradients of a recorded step would be above an edge at another loss scale.

A power of two moves every value by whole octaves. Counts by octave are therefore exact for any edge that is the largest
value of an octave in the format of the gradients.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.record.watching import probes_for
from loops.replay.recording import Recording
from loops.support.errors import LoopError

_LEAST, _MOST = -149, 129
"""The first and the last counted octave: zeros are below the first, infinities and NaN in the last."""


class Tallies(NamedTuple):
    """Cumulative counts of the gradients of weights.

    Attributes:
        below: Int64 [steps, octaves + 1], the number of values below each octave, and the total at the end.
        scale: Int32 [steps], log2 of the scale at which they were counted.
        octaves: For each edge the octave above it.
    """

    below: np.ndarray
    scale: np.ndarray
    octaves: tuple[int, ...]

    def first(self, steps: int) -> Tallies:
        """The counts of the first `steps` steps."""
        return self._replace(below=self.below[:steps], scale=self.scale[:steps])

    def counted(self, below: tf.Tensor, scale: tf.Tensor, step: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
        """`Event.histogram` of a step at another loss scale, int64 [edges + 1].

        Args:
            below: The attribute `below` as a tensor.
            scale: The attribute `scale` as a tensor.
            step: Scalar int32, the index of the step from 0.
            loss_scale: Scalar float32, a power of two.
        """
        bits = tf.bitcast(loss_scale, tf.int32)
        moved = tf.bitwise.right_shift(bits, 23) - 127 - scale[step]
        counts = below[step]
        last = below.shape[1] - 1
        at = [counts[tf.clip_by_value(octave - _LEAST - moved, 0, last - 1)] for octave in self.octaves]
        ends = [tf.zeros_like(at[0]), *at, counts[last]]
        return tf.stack([high - low for low, high in itertools.pairwise(ends)])


def tallies_of(recording: Recording, edges: tuple[float, ...]) -> Tallies:
    """The counts of a trace, for a strategy that needs a histogram with these edges.

    Raises:
        LoopError: If a step has no histogram of the gradients of the weights, or an edge is within an octave.
    """
    octaves = tuple(_octave_above(recording.name, edge) for edge in edges)
    parts = np.log2(recording.scale)
    if (parts != np.round(parts)).any():
        raise LoopError(
            f"{recording.name}: it was recorded at loss scales that are not powers of two, so its counts by octave "
            "cannot be moved. Record it with a strategy whose scales are powers of two, such as dynamic."
        )
    if "micro-batches" in recording.tables.lacks:
        raise LoopError(
            f"{recording.name}: the gradients of its micro-batches were counted before they were summed, so it lacks "
            "the histogram of a step's gradients. Record it with accumulate=1."
        )
    if "weights" in recording.tables.lacks:
        raise LoopError(
            f"{recording.name}: it lacks the histograms of the gradients of some weights. Record it with "
            f"{probes_for(recording.tables.parts)}, of all layers and with the kind weight_gradients."
        )
    return Tallies(_below(recording), parts.astype(np.int32), octaves)


def _below(recording: Recording) -> np.ndarray:
    table = recording.tables.histograms
    names = table["tensor"].combine_chunks()
    weights = np.array([name.startswith("weight_gradients/") for name in names.dictionary.to_pylist()], bool)
    chosen = weights[names.indices.to_numpy()] if len(table) else np.zeros(0, bool)
    step, place, count = (table[name].to_numpy()[chosen] for name in ("step", "bin", "count"))
    missing = np.setdiff1d(recording.step, step)
    if len(missing):
        raise LoopError(
            f"{recording.name}: {len(missing)} of {len(recording.step)} steps have no histogram of the weights' "
            f"gradients, the first of them step {missing[0]}. Record one at each step: hs.Trace(path, every=1) and "
            "hs.observe.watch(model), or halfstep train --trace 1."
        )
    rows = np.searchsorted(recording.step, step)
    kept = (rows < len(recording.step)) & (recording.step[np.minimum(rows, len(recording.step) - 1)] == step)
    counts = np.zeros([len(recording.step), _MOST - _LEAST + 1], np.int64)
    # The bins are zeros, then the octaves, then infinities and NaN.
    np.add.at(counts, (rows[kept], np.minimum(place[kept].astype(np.int64), scaler.observe.INFINITY)), count[kept])
    return np.cumsum(counts, axis=1)


def _octave_above(name: str, edge: float) -> int:
    """The lowest octave whose values are all above the edge."""
    octave = math.floor(math.log2(edge))
    largest = 2.0 ** (octave + 1) * (1 - scaler.float_format("float16").epsilon / 2)
    if edge >= largest:
        return octave + 1
    raise LoopError(
        f"{name}: its histograms count by octave, so the number of values above {edge:g} is unknown. Choose an edge "
        f"that is the largest float16 number of its octave, such as {largest:g}."
    )


class Counted(NamedTuple):
    """The nonzero bins of the gradients' histograms, one entry for each step, tensor and bin.

    Attributes:
        row: Int64 [entries], the index of the step in the recording.
        largest: Float64 [entries], the largest magnitude of the bin, at the recorded scale; 0 for zeros.
        zero: Float64 [entries], the largest magnitude that the format rounds to zero.
        values: Float64 [entries], the number of values in the bin.
    """

    row: np.ndarray
    largest: np.ndarray
    zero: np.ndarray
    values: np.ndarray


class Lost(NamedTuple):
    """The number of values that would be flushed to zero, and that of all values."""

    flushed: float
    values: float


def counted_in(recording: Recording) -> Counted:
    """The counts of all gradients that carry the loss scale."""
    table, tensors = recording.tables.histograms, recording.tables.tensors.to_pylist()
    carries = np.array([tensor["carries_scale"] for tensor in tensors], bool)
    forms = [scaler.float_format(tensor["format"]) for tensor in tensors]
    zero, epsilon, smallest = (
        np.array([getattr(form, name) for form in forms], np.float64)
        for name in ("zero_threshold", "epsilon", "smallest_subnormal")
    )
    tensor = table["tensor"].combine_chunks().indices.to_numpy() if len(table) else np.zeros(0, int)
    step, place, count = (table[name].to_numpy() for name in ("step", "bin", "count"))
    rows = np.searchsorted(recording.step, step)
    there = rows < len(recording.step)
    kept = there & (recording.step[np.where(there, rows, 0)] == step)
    kept &= carries[tensor] if len(tensors) else False
    kept &= place < scaler.observe.INFINITY
    tensor, exponent = tensor[kept], place[kept].astype(np.int64) - scaler.observe.bin_of(0)
    apart = np.maximum(np.ldexp(epsilon[tensor], exponent), smallest[tensor])
    largest = np.where(place[kept] == scaler.observe.ZERO, 0.0, np.ldexp(1.0, exponent + 1) - apart)
    return Counted(rows[kept], largest, zero[tensor], count[kept].astype(np.float64))


def lost(counted: Counted, recording: Recording, scales: np.ndarray, skipped: np.ndarray, since: int = 0) -> Lost:
    """How many values would be zero at these scales, over the steps that are not skipped, from the index `since` on.

    Args:
        counted: From `counted_in`.
        recording: From `recording_of`.
        scales: Float32 [steps], the replayed scales.
        skipped: Bool [steps].
        since: The index of the first step that counts.
    """
    applied = ~skipped[counted.row] & (counted.row >= since)
    moved = scales.astype(np.float64) / recording.scale
    zero = applied & (counted.largest > 0) & (counted.largest * moved[counted.row] <= counted.zero)
    return Lost(float(counted.values[zero].sum()), float(counted.values[applied].sum()))
