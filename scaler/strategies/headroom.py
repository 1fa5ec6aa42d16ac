"""The loss scale that follows the largest gradient at a distance, and learns the distance."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.formats import float_format
from scaler.checks import as_count, as_float, check_bounds, check_count, within
from scaler.strategies import exact
from scaler.strategies.base import Event, Needs, amax_of, bounded

_UNKNOWN = -1000


class HeadroomState(NamedTuple):
    """State of `Headroom`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        peak: Scalar int32: amax was below 2^peak lately; -1000 before the first observation.
        below_peak: Scalar int32, in [0, memory), observations since one was as high as the peak.
        distance: Scalar int32, octaves kept between peak and the format's maximum, at least `headroom`.
        calm: Scalar int32, in [0, relax_interval), finite steps since the last non-finite one or change of distance.
    """

    loss_scale: tf.Tensor
    peak: tf.Tensor
    below_peak: tf.Tensor
    distance: tf.Tensor
    calm: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Headroom:
    """Keep the largest gradient a few octaves below the format's maximum, and learn from overflows how many.

        finite:      e = floor(log2(amax)) + 1, unless amax = 0
                     e >= peak:                          peak = e
                     below it for `memory` steps:        peak -= 1, and so on after as many more
                     finite for `relax_interval` steps:  distance = max(distance - 1, headroom), and so on
                     scale = 2^(top - peak - distance)   top = ceil(log2(format_max)): 16 for float16
        non-finite:  scale = scale / 2
                     distance = the one that belongs to this scale, when a peak is known

    The scale moves with the gradients at once, up or down, without waiting out an interval or risking an overflow.
    But what overflows is rarely the gradient of a weight. It is that of an activation, which is not measured: so an
    overflow says that the distance is too small, and the distance grows by an octave until `relax_interval` finite
    steps have passed. The scale is always a power of two, within the bounds.

    The defaults were chosen on recorded traces of a small network; `benchmarks/headroom.py --tune` shows them among a
    hundred others, and without `--tune` where this beats `Dynamic` and where it loses.

    Args:
        initial_scale: Loss scale until the first observation, in [min_scale, max_scale].
        headroom: Least distance in octaves, at least 1.
        memory: Observations after which a peak that was not reached again is an octave lower.
        relax_interval: Finite steps after which a greater distance is tried an octave smaller.
        format: Of the gradients, as `float_format` takes it.
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    Every number may also be a scalar tensor or variable, which is not checked.

    Raises:
        InvalidArgument: For a value outside the ranges above; in `update` for an event without amax.
    """

    initial_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    headroom: int = 1
    memory: int = 100
    relax_interval: int = 300
    format: str = "float16"
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    needs: ClassVar[Needs] = Needs(amax=True)
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        for name, example in (("headroom", 1), ("memory", 100), ("relax_interval", 300)):
            check_count(name, getattr(self, name), example)
        float_format(self.format)

    def init(self) -> HeadroomState:
        """The state before the first step."""
        zero = tf.constant(0)
        loss_scale = bounded(self, exact.power_of_two_at_most(as_float(self.initial_scale)))
        return HeadroomState(loss_scale, tf.constant(_UNKNOWN), zero, tf.cast(self.headroom, tf.int32), zero)

    @no_autograph
    def update(self, state: HeadroomState, event: Event) -> HeadroomState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, amax = amax_of(self, event)
        top = math.ceil(math.log2(float_format(self.format).max))
        peak, below_peak = self._peak(state, finite, amax)
        distance, calm = self._relaxed(state)
        known = peak > _UNKNOWN
        followed = tf.where(known, exact.power_of_two(top - peak - distance), state.loss_scale)
        halved = bounded(self, state.loss_scale * 0.5)
        implied = tf.maximum(top - peak - tf.cast(exact.exponent(halved), peak.dtype), as_count(self.headroom, peak))
        return HeadroomState(
            loss_scale=bounded(self, tf.where(finite, followed, halved)),
            peak=peak,
            below_peak=below_peak,
            distance=tf.where(finite, distance, tf.where(known, implied, state.distance)),
            calm=tf.where(finite, calm, tf.zeros_like(calm)),
        )

    def _peak(self, state: HeadroomState, finite: tf.Tensor, amax: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The next `peak` and `below_peak`."""
        height = exact.exponent(amax) + 1
        observed = tf.logical_and(finite, height > -126)
        known, memory = within(state.peak, _UNKNOWN, 128), as_count(self.memory, state.below_peak)
        height = tf.cast(height, known.dtype)
        reached = height >= known
        below = within(state.below_peak, 0, memory - 1) + 1
        forget = below >= memory
        peak = tf.where(reached, height, tf.where(forget, known - 1, known))
        below = tf.where(tf.logical_or(reached, forget), tf.zeros_like(below), below)
        return tf.where(observed, peak, known), tf.where(observed, below, state.below_peak)

    def _relaxed(self, state: HeadroomState) -> tuple[tf.Tensor, tf.Tensor]:
        """The next `distance` and `calm`, of a finite step."""
        least, interval = as_count(self.headroom, state.distance), as_count(self.relax_interval, state.calm)
        calm = within(state.calm, 0, interval - 1) + 1
        relax = calm >= interval
        distance = within(state.distance, least, least + 512)
        return tf.maximum(tf.where(relax, distance - 1, distance), least), tf.where(relax, tf.zeros_like(calm), calm)
