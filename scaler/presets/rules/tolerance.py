"""Backoff when a share of the steps since a change is non-finite; and where fairseq and DeepSpeed give up."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_count, check_growth_factor, check_number, check_scale
from scaler.outcome.stuck import Reading, StuckPolicy
from scaler.presets.rules.precision import EveryStep, after, as_double, change, first, held
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
class Tolerance(EveryStep):
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
    _allows: ClassVar[Callable[..., Any]] = operator.gt
    """Whether a backoff may lead to a scale, which is given with `min_loss_scale`."""

    def __post_init__(self) -> None:
        check_scale("initial_scale", self.initial_scale)
        check_growth_factor(self.growth_factor)
        check_count("growth_interval", self.growth_interval, 2000)
        check_number("tolerance", self.tolerance, "a share of at least 0", lambda v: 0 <= v < math.inf)
        if self.threshold is not None:
            check_scale("threshold", self.threshold)
        check_number("min_loss_scale", self.min_loss_scale, "a number in [0, 2^126]", lambda v: 0 <= v <= LARGEST_SCALE)

    @property
    def min_scale(self) -> float:
        """The lowest scale that backoffs from the first one lead to."""
        scale = float(self.initial_scale)
        if self.threshold is not None and self._allows(self.threshold, self.min_loss_scale):
            return min(float(self.threshold), scale)
        for _ in range(10_000):
            lower = scale / self.growth_factor
            if lower < SMALLEST_SCALE or not self._allows(lower, self.min_loss_scale):
                return scale
            scale = lower
        return max(float(self.min_loss_scale), SMALLEST_SCALE)

    def init(self) -> ToleranceState | MovingWindowState:
        """The state before the first step."""
        return first(ToleranceState, self.initial_scale, *[tf.constant(0, tf.int32)] * 3)

    def update(self, state: ToleranceState | MovingWindowState, event: Event) -> ToleranceState | MovingWindowState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, factor = event.finite, self.growth_factor
        # A checkpoint may bring counts below zero, which would divide by zero.
        good, since, overflows = (tf.maximum(n, 0) for n in (state.good_steps, state.since_change, state.overflows))
        good, since = tf.where(finite, good + 1, tf.zeros_like(good)), since + 1
        overflows = tf.where(finite, overflows, overflows + 1)
        share = tf.cast(overflows, tf.float64) / tf.cast(since, tf.float64)
        back_off = tf.logical_and(tf.logical_not(finite), share >= as_double(self.tolerance))
        window = state.window if isinstance(state, MovingWindowState) else as_double(self.growth_interval)
        window = tf.maximum(window, as_double(1.0))
        grow = tf.logical_and(finite, tf.equal(tf.math.floormod(tf.cast(good, tf.float64), window), 0))

        scale = held(state)
        lower = change(scale, back_off, 1.0, factor)
        if self.threshold is not None:
            lower = tf.maximum(lower, as_double(self.threshold))
        # metaseq also puts the old scale back after a step that was only tolerated, which changes nothing.
        lower = tf.where(self._allows(lower, as_double(self.min_loss_scale)), lower, scale)
        fields = {
            "good_steps": good,
            "since_change": tf.where(tf.logical_or(grow, back_off), tf.zeros_like(since), since),
            "overflows": tf.where(back_off, tf.zeros_like(overflows), overflows),
        }
        if isinstance(state, MovingWindowState):
            shorter = tf.maximum(tf.floor(change(window, back_off, 1.0, factor)), as_double(1.0))
            fields["window"] = tf.where(back_off, shorter, change(window, grow, factor))
        return after(state, tf.where(back_off, lower, change(scale, grow, factor)), **fields)


@dataclasses.dataclass(frozen=True)
class MovingWindow(Tolerance):
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

    growth_interval: int = 256
    min_loss_scale: float = 2.0**-5
    _allows: ClassVar[Callable[..., Any]] = operator.ge

    def init(self) -> MovingWindowState:
        """The state before the first step."""
        zeros = [tf.constant(0, tf.int32)] * 3
        return first(MovingWindowState, self.initial_scale, as_double(self.growth_interval), *zeros)


@dataclasses.dataclass(frozen=True)
class SkippedAtFloor(StuckPolicy):
    """Stuck when a step was skipped that was attempted at the floor already.

    `StuckPolicy(at_floor=True)` finds that the floor was *reached*. This compares two visits of the host: the scale was
    at the floor at both, and the last step was skipped. With a visit after each step that is the step it is about; with
    fewer visits, it is found at the next visit.

    Args:
        in_a_row: Only when at least so many steps in a row were skipped.
    """

    consecutive_skips: int | None = None
    skip_rate: float | None = None
    consecutive_bad_losses: int | None = None
    bad_loss_rate: float | None = None
    in_a_row: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("in_a_row", self.in_a_row, 1)

    def problem(self, readings: Sequence[Reading], min_scale: float, max_scale: float) -> str | None:
        """What is wrong, as the beginning of a sentence, or None."""
        if len(readings) > 1 and readings[-2].attempted and min_scale < max_scale:
            before, now = readings[-2:]
            at_floor = max(before.loss_scale, now.loss_scale) <= min_scale
            if at_floor and now.attempted > before.attempted and now.consecutive_skips >= self.in_a_row:
                return f"a step was skipped that was attempted at the lowest loss scale, {min_scale:g}"
        return super().problem(readings, min_scale, max_scale)
