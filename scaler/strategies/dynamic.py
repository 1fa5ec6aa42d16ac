"""The loss scale that looks for its own level."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.variables import choose, either
from scaler.checks import (
    as_count,
    as_float,
    check_backoff_factor,
    check_bounds,
    check_count,
    check_flag,
    check_growth_factor,
    within,
)
from scaler.strategies.base import Event, bounded, first_scale


class DynamicState(NamedTuple):
    """State of `Dynamic`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        good_steps: Scalar int32, finite steps since the last growth or non-finite step.
        budget: Scalar int32, in [0, hysteresis], non-finite steps left before the scale backs off.
    """

    loss_scale: tf.Tensor
    good_steps: tf.Tensor
    budget: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Grow after a run of finite steps, back off at a non-finite one.

        finite:      good += 1
                     when good >= growth_interval: scale = min(scale * growth_factor, max_scale); good = 0
        non-finite:  good = 0; budget = max(budget - 1, 0)
                     when budget == 0: scale = max(scale * backoff_factor, min_scale)
        budget:      starts at hysteresis, and goes back to it at a growth;
                     with consecutive_hysteresis at every finite step

    Growth comes exactly on the growth_interval-th consecutive finite step. With hysteresis=1 every non-finite step
    backs off. With hysteresis=h the first h - 1 are only skipped; they are counted *cumulatively* since the last
    growth (Megatron's rule), or *consecutively* if asked for. Once the budget is spent, every further non-finite
    step backs off until it is refilled.

    The defaults keep the scale between 2^-14, below which a float16 gradient of 1e-3 is flushed to zero, and 2^40,
    from where it is back at 2^15 after 25 skipped steps.

    A step that is skipped because its loss is not finite is bad data. It is not seen, and counts as neither here.

    Args:
        initial_scale: Loss scale of the first step, in [min_scale, max_scale].
        growth_factor: Greater than 1.
        backoff_factor: Between 0 and 1, both excluded.
        growth_interval: Consecutive finite steps to a growth, at least 1. Lowered in mid-run below the steps already
            counted, it takes effect at the next finite step.
        min_scale: Floor, at least 2^-126; it may lie below 1.
        max_scale: Ceiling, at most 2^126.
        hysteresis: Non-finite steps to the first backoff, at least 1.
        consecutive_hysteresis: Whether a finite step refills the budget.
        sees_every_step: Whether bad data counts as non-finite too, as in most other systems.

    Every number may also be a scalar tensor or variable, to be changed while a compiled step runs; then nothing is
    checked, but the scale still stays within its bounds.

    Raises:
        InvalidArgument: For a number outside the ranges above.

    References:
        Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740) for skipping; Kuchaiev et al. 2018
        (https://arxiv.org/abs/1805.10387) for backoff and growth.
    """

    initial_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    sees_every_step: bool = False
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        check_growth_factor(self.growth_factor)
        check_backoff_factor(self.backoff_factor)
        check_count("growth_interval", self.growth_interval, 2000)
        check_count("hysteresis", self.hysteresis, 1)
        check_flag("consecutive_hysteresis", self.consecutive_hysteresis)
        check_flag("sees_every_step", self.sees_every_step)

    def init(self) -> DynamicState:
        """The state before the first step."""
        return DynamicState(
            loss_scale=first_scale(self),
            good_steps=tf.constant(0, tf.int32),
            budget=tf.cast(self.hysteresis, tf.int32),
        )

    @no_autograph
    def update(self, state: DynamicState, event: Event) -> DynamicState:
        """The state after a step that was attempted with `state` and showed `event`."""
        hysteresis = as_count(self.hysteresis, state.budget)
        last, zero = as_count(self.growth_interval - 1, state.good_steps), tf.zeros_like(state.good_steps)
        # A checkpoint may bring counts that this strategy cannot reach; the largest integer plus 1 is negative.
        left = tf.minimum(state.budget, hysteresis)

        def finite() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            good_steps = within(state.good_steps, zero, last)
            grow = good_steps >= last
            factor = choose(grow, as_float(self.growth_factor), 1.0)
            consecutive = self.consecutive_hysteresis
            refill = grow if consecutive is False else tf.logical_or(grow, consecutive)
            return factor, choose(grow, zero, good_steps + 1), choose(refill, hysteresis, left)

        def non_finite() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            budget = tf.maximum(left - 1, 0)
            return choose(budget > 0, 1.0, as_float(self.backoff_factor)), zero, budget

        factor, good_steps, budget = either(event.finite, finite, non_finite)
        return DynamicState(bounded(self, state.loss_scale * factor), good_steps, budget)
