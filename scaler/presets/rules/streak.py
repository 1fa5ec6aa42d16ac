"""Growth after a run of finite steps, backoff after non-finite ones: what most systems do, each in its own way."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    as_count,
    check_backoff_factor,
    check_count,
    check_flag,
    check_growth_factor,
    check_number,
    check_scale,
    is_symbolic,
)
from scaler.errors import InvalidArgument
from scaler.presets.rules.precision import EveryStep, after, as_double, change, first, held, larger, single, smaller
from scaler.strategies.base import Event
from scaler.strategies.dynamic import Dynamic, DynamicState
from scaler.strategies.nested import AroundWithBounds

_REFILLS = ("growth", "finite", "backoff")
DIVIDES: Any = object()
"""In the place of a backoff factor: a backoff divides by the growth factor."""


class StreakState(NamedTuple):
    """State of `Streak`.

    Attributes:
        loss_scale: Scalar float32.
        exact_scale: Scalar float64, the scale as the original holds it; `loss_scale` is this, rounded.
        good_steps: Scalar int32, finite steps counted towards the next growth.
        budget: Scalar int32, in [0, hysteresis], non-finite steps left before the scale backs off.
    """

    loss_scale: tf.Tensor
    exact_scale: tf.Tensor
    good_steps: tf.Tensor
    budget: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Streak(EveryStep):
    """What `scaler.Dynamic` does, with the choices that other systems made.

        finite:      good += 1
                     when good >= first_interval:
                         scale = min(scale * growth_factor, growth_ceiling); good = first_interval - growth_interval
        non-finite:  good = 0; budget = max(budget - 1, 0)
                     when budget == 0: scale = max(scale * backoff_factor, backoff_floor), a backoff
        budget:      starts at hysteresis, and goes back to it at the events named by refill

    So the first growth after the start or a non-finite step takes `first_interval` finite steps, and each further one
    `growth_interval`. Floor and ceiling act on backoff and growth alone: a scale may start outside of them.

    Args:
        initial_scale: Loss scale of the first step, in [2^-126, 2^126].
        growth_factor: Greater than 0; below 1 it is a number, not a tensor.
        backoff_factor: Greater than 0, or None to divide by `growth_factor`.
        growth_interval: At least 1.
        first_interval: At least `growth_interval`; the same if None.
        hysteresis: Non-finite steps to the first backoff, at least 1.
        refill: Any of "growth" (every growth refills the budget), "finite" (every finite step) and "backoff".
        backoff_floor: No backoff goes below.
        growth_ceiling: No growth goes above.
        double: Whether the original keeps its scale in double precision, as a Python float, instead of in float32.

    Every number may also be a tensor, as for `Dynamic`.

    Raises:
        InvalidArgument: For a number outside the ranges above.
    """

    initial_scale: float
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    backoff_factor: float | None = 0.5
    growth_interval: int = 2000
    first_interval: int | None = None
    hysteresis: int = 1
    refill: tuple[str, ...] = ("growth",)
    backoff_floor: float = SMALLEST_SCALE
    growth_ceiling: float = LARGEST_SCALE
    double: bool = False

    def __post_init__(self) -> None:
        for name in ("initial_scale", "backoff_floor", "growth_ceiling"):
            check_scale(name, getattr(self, name))
        for name in ("growth_factor", "backoff_factor"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "a number in [2^-126, 2^126]", lambda v: 2**-126 <= v <= 2**126)
        low, high = self.backoff_floor, self.growth_ceiling
        if not is_symbolic(low) and not is_symbolic(high) and low > high:
            raise InvalidArgument(
                f"min_scale={low!r}, max_scale={high!r}: expected min_scale <= max_scale, else a growth would lower "
                "the scale and a backoff raise it."
            )
        check_count("growth_interval", self.growth_interval, 2000)
        check_count("hysteresis", self.hysteresis, 1)
        check_flag("double", self.double)
        if not set(self.refill) <= set(_REFILLS):
            raise InvalidArgument(f"refill={self.refill!r}: expected a tuple of some of {', '.join(_REFILLS)}.")
        if self.first_interval is not None:
            check_count("first_interval", self.first_interval, 2001)
            numbers = (self.first_interval, self.growth_interval)
            if not any(map(is_symbolic, numbers)) and numbers[0] < numbers[1]:
                raise InvalidArgument(f"first_interval={numbers[0]}: expected at least growth_interval={numbers[1]}.")

    @property
    def min_scale(self) -> float:
        """No scale of this strategy is below."""
        # A growth factor below 1, which MindSpore takes, shrinks the scale at a growth, where there is no floor.
        grows = is_symbolic(self.growth_factor) or self.growth_factor >= 1
        return smaller(self.initial_scale, self.backoff_floor) if grows else SMALLEST_SCALE

    @property
    def max_scale(self) -> float:
        """No scale of this strategy is above."""
        return larger(self.initial_scale, self.growth_ceiling)

    def init(self) -> StreakState:
        """The state before the first step."""
        good_steps, budget = tf.constant(0, tf.int32), tf.cast(self.hysteresis, tf.int32)
        return first(StreakState, self._rounded(as_double(self.initial_scale)), good_steps, budget)

    def update(self, state: StreakState, event: Event) -> StreakState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, hysteresis = event.finite, as_count(self.hysteresis, state.budget)
        interval = as_count(self.growth_interval, state.good_steps)
        to_first = interval if self.first_interval is None else as_count(self.first_interval, state.good_steps)
        # A checkpoint may bring counts that this strategy cannot reach.
        counted, left = tf.clip_by_value(state.good_steps, 0, to_first - 1), tf.minimum(state.budget, hysteresis)
        good_steps = tf.where(finite, counted + 1, tf.zeros_like(counted))
        budget = tf.where(finite, left, tf.maximum(left - 1, 0))
        grow = tf.logical_and(finite, good_steps >= to_first)
        back_off = tf.logical_and(tf.logical_not(finite), budget <= 0)
        happened = {"growth": grow, "finite": finite, "backoff": back_off}

        scale = held(state)
        by = (1.0, self.growth_factor) if self.backoff_factor is None else (self.backoff_factor, 1.0)
        higher = tf.minimum(change(scale, grow, self.growth_factor), as_double(self.growth_ceiling))
        lower = tf.maximum(change(scale, back_off, *by), as_double(self.backoff_floor))
        scale = self._rounded(tf.where(grow, higher, tf.where(back_off, lower, scale)))
        for name in self.refill:
            budget = tf.where(happened[name], hysteresis, budget)
        return after(state, scale, good_steps=tf.where(grow, to_first - interval, good_steps), budget=budget)

    def _rounded(self, scale: tf.Tensor) -> tf.Tensor:
        """A float64 scale as the original holds it."""
        return scale if self.double else single(scale)


def streak(
    initial_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    in_float32: bool = False,
    **choices: Any,
) -> Streak:
    """A `Streak` whose growth factor grows the scale, and whose backoff factor shrinks it.

    Args:
        initial_scale: As of `Streak`.
        growth_factor: In (1, 2^126].
        backoff_factor: In [2^-126, 1), or `DIVIDES`: a backoff divides by the growth factor.
        growth_interval: As of `Streak`.
        in_float32: Whether the original rounds the factors to float32.
        choices: The other arguments of `Streak`.
    """
    check_growth_factor(growth_factor)
    backoff: float | tf.Tensor | None = None
    if backoff_factor is not DIVIDES:
        check_backoff_factor(backoff_factor)
        backoff = single(backoff_factor) if in_float32 else backoff_factor
    growth = single(growth_factor) if in_float32 else growth_factor
    return Streak(
        initial_scale, growth_factor=growth, backoff_factor=backoff, growth_interval=growth_interval, **choices
    )


class OneStepLateState(NamedTuple):
    """State of `OneStepLate`.

    Attributes:
        loss_scale: Scalar float32, the scale in use.
        next_scale: Scalar float32, the one that was decided last, used after the next step.
        left_scale: Scalar float32, `loss_scale` as this strategy left it: another one was put in its place, by a
            combinator or a checkpoint, and is what the strategy goes on from.
        good_steps: Scalar int32, as `DynamicState` has it.
        budget: Scalar int32, as `DynamicState` has it.
    """

    loss_scale: tf.Tensor
    next_scale: tf.Tensor
    left_scale: tf.Tensor
    good_steps: tf.Tensor
    budget: tf.Tensor


@dataclasses.dataclass(frozen=True)
class OneStepLate(AroundWithBounds):
    """Use what another strategy decides, one step late.

        every step:  scale = next; next = what the strategy makes of next

    So the step after an overflow still uses the scale that overflowed, and if that overflows again, the scale is
    halved twice.

    Args:
        strategy: Decides; its bounds are the bounds of both scales.
    """

    strategy: Dynamic
    sees_every_step: ClassVar[bool] = True

    def init(self) -> OneStepLateState:
        """The state before the first step."""
        state = self.strategy.init()
        return OneStepLateState(state.loss_scale, state.loss_scale, state.loss_scale, state.good_steps, state.budget)

    def update(self, state: OneStepLateState, event: Event) -> OneStepLateState:
        """The state after a step that was attempted with `state` and showed `event`."""
        replaced = tf.logical_or(tf.not_equal(state.loss_scale, state.left_scale), tf.math.is_nan(state.next_scale))
        known = tf.where(replaced, state.loss_scale, state.next_scale)
        used = tf.clip_by_value(known, tf.cast(self.min_scale, tf.float32), tf.cast(self.max_scale, tf.float32))
        decided = self.strategy.update(DynamicState(used, state.good_steps, state.budget), event)
        return OneStepLateState(used, decided.loss_scale, used, decided.good_steps, decided.budget)
