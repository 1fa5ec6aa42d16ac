"""A growth interval that grows with the scale and shrinks with it: metaseq's rule."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_number
from scaler.presets.rules.precision import as_double, change, held, kept
from scaler.presets.rules.tolerance import check_tolerance, count, exceeds, lowest
from scaler.strategies.base import Event


class MovingWindowState(NamedTuple):
    """State of `MovingWindow`.

    Attributes:
        loss_scale: Scalar float32.
        exact_scale: Scalar float64, which `loss_scale` is rounded from.
        window: Scalar float64, the current growth interval; a fraction if the growth factor is one.
        good_steps: Scalar int32, finite steps since the last non-finite one.
        since_change: Scalar int32, steps since the scale changed.
        overflows: Scalar int32, non-finite steps since the last backoff.
    """

    loss_scale: tf.Tensor
    exact_scale: tf.Tensor
    window: tf.Tensor
    good_steps: tf.Tensor
    since_change: tf.Tensor
    overflows: tf.Tensor


@dataclasses.dataclass(frozen=True)
class MovingWindow:
    """Wait longer the larger the scale is.

        every step:  since_change += 1
        finite:      good += 1
                     when good is a multiple of window:
                         scale = scale * growth_factor; window = window * growth_factor; since_change = 0
        non-finite:  good = 0; overflows += 1
                     when overflows / since_change >= tolerance:
                         new = max(scale / growth_factor, threshold); since_change = 0; overflows = 0
                         window = max(floor(window / growth_factor), 1)
                         scale = new when new >= min_loss_scale, else it stays

    Args:
        initial_scale: Loss scale of the first step, in [2^-126, 2^126].
        growth_factor: Greater than 1; the divisor as well, of both.
        growth_interval: The first window, at least 1.
        tolerance: A share, at least 0; above 1 it is hardly ever reached.
        threshold: No backoff goes below; None for no threshold.
        min_loss_scale: No backoff goes below: one that would leaves the scale where it was.

    Raises:
        InvalidArgument: For a number outside the ranges above.
    """

    initial_scale: float
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    growth_interval: int = 256
    tolerance: float = 0.0
    threshold: float | None = None
    min_loss_scale: float = 2.0**-5
    int64_counts: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tolerance(self.initial_scale, self.growth_factor, self.growth_interval, self.tolerance, self.threshold)
        check_number("min_loss_scale", self.min_loss_scale, "a number in [0, 2^126]", lambda v: 0 <= v <= LARGEST_SCALE)

    @property
    def min_scale(self) -> float:
        """The lowest scale that backoffs from the first one lead to."""
        floor = max(self.min_loss_scale, self.threshold or 0.0, SMALLEST_SCALE)
        if self.threshold is not None and floor == self.threshold:
            return min(float(self.threshold), float(self.initial_scale))
        return lowest(self.initial_scale, self.growth_factor, lambda scale: scale >= floor, floor)

    def init(self) -> MovingWindowState:
        """The state before the first step."""
        exact, zero = as_double(self.initial_scale), tf.constant(0, tf.int32)
        window = as_double(self.growth_interval)
        return MovingWindowState(tf.cast(exact, tf.float32), exact, window, zero, zero, zero)

    def update(self, state: MovingWindowState, event: Event) -> MovingWindowState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, factor = event.finite, self.growth_factor
        good_steps, since_change, overflows = count(state.good_steps, state.since_change, state.overflows, finite)
        window = tf.maximum(state.window, as_double(1.0))
        grow = tf.logical_and(finite, tf.equal(tf.math.floormod(tf.cast(good_steps, tf.float64), window), 0))
        back_off = exceeds(overflows, since_change, self.tolerance, finite)

        scale = held(state.loss_scale, state.exact_scale)
        lower = change(scale, back_off, 1.0, factor)
        if self.threshold is not None:
            lower = tf.maximum(lower, as_double(self.threshold))
        # metaseq also puts the old scale back after a step that was only tolerated, which changes nothing.
        lower = tf.where(lower >= as_double(self.min_loss_scale), lower, scale)
        exact = kept(tf.where(back_off, lower, change(scale, grow, factor)))
        shorter = tf.maximum(tf.floor(change(window, back_off, 1.0, factor)), as_double(1.0))
        return MovingWindowState(
            loss_scale=tf.cast(exact, tf.float32),
            exact_scale=exact,
            window=tf.where(back_off, shorter, change(window, grow, factor)),
            good_steps=good_steps,
            since_change=tf.where(tf.logical_or(grow, back_off), tf.zeros_like(since_change), since_change),
            overflows=tf.where(back_off, tf.zeros_like(overflows), overflows),
        )
