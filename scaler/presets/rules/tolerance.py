"""Backoff when the share of non-finite steps since the last change reaches a tolerance: fairseq's rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, as_count, check_count, check_number, check_scale
from scaler.presets.rules.precision import as_double, change, held, kept
from scaler.strategies.base import Event


class ToleranceState(NamedTuple):
    """State of `Tolerance`.

    Attributes:
        loss_scale: Scalar float32.
        exact_scale: Scalar float64, which `loss_scale` is rounded from.
        good_steps: Scalar int32, finite steps since the last non-finite one.
        since_change: Scalar int32, steps since the scale changed.
        overflows: Scalar int32, non-finite steps since the last backoff.
    """

    loss_scale: tf.Tensor
    exact_scale: tf.Tensor
    good_steps: tf.Tensor
    since_change: tf.Tensor
    overflows: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Tolerate a share of non-finite steps before backing off.

        every step:  since_change += 1
        finite:      good += 1
                     when good is a multiple of growth_interval: scale = scale * growth_factor; since_change = 0
        non-finite:  good = 0; overflows += 1
                     when overflows / since_change >= tolerance:
                         new = max(scale / growth_factor, threshold); since_change = 0; overflows = 0
                         scale = new when new > min_loss_scale, else it stays: fairseq raises here

    A growth keeps the count of non-finite steps, but restarts the count of steps, so the share may then exceed 1.

    Args:
        initial_scale: Loss scale of the first step, in [2^-126, 2^126].
        growth_factor: Greater than 1; the divisor as well.
        growth_interval: At least 1.
        tolerance: A share, at least 0; above 1 it is hardly ever reached.
        threshold: No backoff goes below; None for no threshold.
        min_loss_scale: The scale stays above.

    Raises:
        InvalidArgument: For a number outside the ranges above.
    """

    initial_scale: float
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    growth_interval: int = 2000
    tolerance: float = 0.0
    threshold: float | None = None
    min_loss_scale: float = 1e-4
    int64_counts: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tolerance(self.initial_scale, self.growth_factor, self.growth_interval, self.tolerance, self.threshold)
        check_number("min_loss_scale", self.min_loss_scale, "a number in [0, 2^126]", lambda v: 0 <= v <= LARGEST_SCALE)

    @property
    def min_scale(self) -> float:
        """The lowest scale that backoffs from the first one lead to."""
        if self.threshold is not None and self.threshold > self.min_loss_scale:
            return min(float(self.threshold), float(self.initial_scale))
        above = max(float(self.min_loss_scale), math.nextafter(SMALLEST_SCALE, 0.0))
        return lowest(self.initial_scale, self.growth_factor, lambda scale: scale > above, above)

    def init(self) -> ToleranceState:
        """The state before the first step."""
        exact, zero = as_double(self.initial_scale), tf.constant(0, tf.int32)
        return ToleranceState(tf.cast(exact, tf.float32), exact, zero, zero, zero)

    def update(self, state: ToleranceState, event: Event) -> ToleranceState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite = event.finite
        good_steps, since_change, overflows = count(state.good_steps, state.since_change, state.overflows, finite)
        grow = tf.logical_and(finite, tf.equal(good_steps % as_count(self.growth_interval, good_steps), 0))
        back_off = exceeds(overflows, since_change, self.tolerance, finite)

        scale = held(state.loss_scale, state.exact_scale)
        lower = change(scale, back_off, 1.0, self.growth_factor)
        if self.threshold is not None:
            lower = tf.maximum(lower, as_double(self.threshold))
        lower = tf.where(lower > as_double(self.min_loss_scale), lower, scale)
        exact = kept(tf.where(back_off, lower, change(scale, grow, self.growth_factor)))
        return ToleranceState(
            loss_scale=tf.cast(exact, tf.float32),
            exact_scale=exact,
            good_steps=good_steps,
            since_change=tf.where(tf.logical_or(grow, back_off), tf.zeros_like(since_change), since_change),
            overflows=tf.where(back_off, tf.zeros_like(overflows), overflows),
        )


def check_tolerance(
    initial_scale: float, growth_factor: float, growth_interval: int, tolerance: float, threshold: float | None
) -> None:
    """Refuses numbers that neither `Tolerance` nor `MovingWindow` can work with."""
    check_scale("initial_scale", initial_scale)
    check_number("growth_factor", growth_factor, "a number in (1, 2^126]", lambda v: 1 < v <= LARGEST_SCALE)
    check_count("growth_interval", growth_interval, 2000)
    check_number("tolerance", tolerance, "a share of at least 0", lambda v: 0 <= v < math.inf)
    if threshold is not None:
        check_scale("threshold", threshold)


def count(
    good_steps: tf.Tensor, since_change: tf.Tensor, overflows: tf.Tensor, finite: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The three counters after a step, before the scale changes."""
    # A checkpoint may bring counts below zero, which would divide by zero.
    good, since, overflows = (tf.maximum(n, 0) for n in (good_steps, since_change, overflows))
    return tf.where(finite, good + 1, tf.zeros_like(good)), since + 1, tf.where(finite, overflows, overflows + 1)


def exceeds(overflows: tf.Tensor, since_change: tf.Tensor, tolerance: float, finite: tf.Tensor) -> tf.Tensor:
    """Whether a non-finite step makes the share of them reach the tolerance."""
    share = tf.cast(overflows, tf.float64) / tf.cast(since_change, tf.float64)
    return tf.logical_and(tf.logical_not(finite), share >= as_double(tolerance))


def lowest(initial_scale: float, divisor: float, allowed: Callable[[float], bool], bound: float) -> float:
    """The last of the scales that repeated division leads to and `allowed` allows, or `bound` if they are too many."""
    scale = float(initial_scale)
    for _ in range(10_000):
        if not allowed(scale / divisor):
            return scale
        scale /= divisor
    return max(bound, SMALLEST_SCALE)
