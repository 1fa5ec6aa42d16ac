"""The loss scale that keeps the share of large gradients at a threshold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.checks import as_count, as_float, check_bounds, check_constant, check_count, check_number
from scaler.strategies.base import Event, Needs, bounded, first_scale, statistic


class HistogramState(NamedTuple):
    """State of `Histogram`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        steps: Scalar int32, in [0, period), finite steps counted since the scale was last looked at.
        total: Scalar int64, gradient values of these steps.
        large: Scalar int64, those of `total` above the edge.
        middle: Scalar int64, those of `total` in the dead band below the edge.
    """

    loss_scale: tf.Tensor
    steps: tf.Tensor
    total: tf.Tensor
    large: tf.Tensor
    middle: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Halve or double, by the share of scaled gradients above an edge (Graphcore's automatic loss scaling).

        finite:      count the values above edge, and all of them, for `period` steps; then
                     large / total > threshold:              scale = max(scale / 2, min_scale)
                     (large + middle) / total <= threshold:  scale = min(scale * 2, max_scale)
                     middle = values above edge / 2^dead_band, up to edge
        non-finite:  scale = max(scale / 2, min_scale); the counts start again

    Without a dead band, which is the published rule, the scale moves every time: it goes up and down by one octave
    for ever. With dead_band=1 it grows only where the doubled gradients would still be below the edge, and rests.

    It counts the gradients of the *weights* where the original counts those of chosen activations as well; the edge,
    three octaves below float16's maximum, is the distance kept from them. Added here: a
    non-finite step halves the scale, where the published rule may still double it; the scale has bounds; and steps
    without any values change nothing.

    Args:
        initial_scale: Loss scale of the first steps, in [min_scale, max_scale].
        edge: Magnitude above which a scaled gradient is large; 1/8 of float16's maximum.
        threshold: Largest allowed share of large values, in [0, 1).
        period: Finite steps between two looks, at least 1.
        dead_band: Octaves below the edge in which the scale stays, in [0, 64].
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    Bounds, threshold and period may also be scalar tensors or variables, which are not checked.

    Raises:
        InvalidArgument: For a number outside the ranges above; in `update` for an event without a histogram.

    References:
        graphcore/popart: willow/include/popart/sessionoptions.hpp (AutomaticLossScalingSettings) and
        willow/src/popx/op/lossscaleupdatex.cpp.
    """

    initial_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    edge: float = 0.125 * 65504
    threshold: float = 1e-7
    period: int = 1
    dead_band: float = 0.0
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        check_constant("edge", self.edge, "a number in [2^-24, 2^100]", lambda v: 2.0**-24 <= v <= 2.0**100)
        check_number("threshold", self.threshold, "a share in [0, 1)", lambda v: 0 <= v < 1)
        check_count("period", self.period, 1)
        check_constant("dead_band", self.dead_band, "a number of octaves in [0, 64]", lambda v: 0 <= v <= 64)

    @property
    def needs(self) -> Needs:
        """The histogram with the edge, and with the dead band's if there is one."""
        lower = self.edge * 2.0**-self.dead_band
        return Needs(edges=(lower, self.edge) if self.dead_band else (self.edge,))

    def init(self) -> HistogramState:
        """The state before the first step."""
        none = tf.constant(0, tf.int64)
        return HistogramState(first_scale(self), tf.constant(0), none, none, none)

    @no_autograph
    def update(self, state: HistogramState, event: Event) -> HistogramState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, counts = tf.convert_to_tensor(event.finite), statistic(self, event, "histogram")
        period = as_count(self.period, state.steps)
        steps = tf.clip_by_value(state.steps, 0, period - 1) + 1
        # `tf.unstack` of int64 is the host's on a GPU.
        total, large = state.total + tf.reduce_sum(counts, axis=0), state.large + counts[-1]
        middle = state.middle + counts[1] if self.dead_band else state.middle
        due = tf.logical_and(finite, steps >= period)
        threshold = tf.cast(as_float(self.threshold), tf.float64)
        all_of_them = tf.cast(tf.maximum(total, 1), tf.float64)
        too_many = tf.cast(large, tf.float64) / all_of_them > threshold
        few = tf.logical_and(total > 0, tf.cast(large + middle, tf.float64) / all_of_them <= threshold)
        halve = tf.logical_or(tf.logical_not(finite), tf.logical_and(due, too_many))
        factor = tf.where(halve, 0.5, tf.where(tf.logical_and(due, few), 2.0, 1.0))
        counting = tf.logical_and(finite, tf.logical_not(due))
        return HistogramState(
            bounded(self, state.loss_scale * factor),
            tf.where(counting, steps, tf.zeros_like(steps)),
            *(tf.where(counting, count, tf.zeros_like(count)) for count in (total, large, middle)),
        )
