"""Strategies around others: within bounds, above a rising floor, below a rising ceiling, or one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from scaler.checks import as_float, check_bounds, check_constant, check_count, check_scale, is_symbolic
from scaler.errors import InvalidArgument
from scaler.strategies import exact
from scaler.strategies.base import (
    Event,
    Needs,
    Strategy,
    bounded,
    bounded_state,
    bounds_of,
    needs_of,
    require_inner,
    sees_every_step,
    takes_int64,
    together,
)
from scaler.strategies.nested import (
    Around,
    AroundWithBounds,
    as_schedule,
    count_up,
    inner_of,
    join,
    own_of,
)


@dataclasses.dataclass(frozen=True)
class Bounded(Around):
    """Keep another strategy's loss scale within bounds.

        state = strategy.update(state, event); scale = min(max(scale, min_scale), max_scale)

    The strategy goes on from the bounded scale, so it leaves a bound with its first move away from it.

    Args:
        strategy: Any strategy.
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    Raises:
        InvalidArgument: For bounds outside these ranges or out of order, or an object that is not a strategy.
    """

    strategy: Strategy
    min_scale: float
    max_scale: float

    def __post_init__(self) -> None:
        require_inner(self.strategy, "Bounded")
        check_bounds(self.min_scale, self.min_scale, self.max_scale)

    def init(self) -> Any:
        """The strategy's state before the first step, bounded."""
        return bounded_state(self, self.strategy.init())

    def update(self, state: Any, event: Event) -> Any:
        """The strategy's state after a step, bounded."""
        return bounded_state(self, self.strategy.update(bounded_state(self, state), event))


@dataclasses.dataclass(frozen=True)
class RisingFloor(AroundWithBounds):
    """Keep another strategy's loss scale above a floor that rises on a schedule ("enhanced loss scaling").

        floor(t) = floors[the greatest key <= t], or nothing before the first key
        state = strategy.update(state, event); t += 1; scale = max(scale, floor(t))

    t counts the steps seen from 0, as in `Scheduled`. Late in training gradients are small, and one spurious overflow
    would lower the scale to where many of them become zero. At the floor such a step is skipped, and the scale stays.
    If the overflow is not spurious, every step is skipped from then on; a `StuckPolicy` says so.

    The state is the strategy's, with `floor_steps` (scalar int32), the steps seen so far.

    Args:
        strategy: Any strategy; a `Dynamic` in the paper.
        floors: Loss scales by the step from which on they are the floor, ascending, each at most the strategy's
            `max_scale`. The default is what the paper reports for GNMT: 8K after 40,000 iterations, 32K after about
            150,000.

    Raises:
        InvalidArgument: For floors that are not loss scales, do not rise, or exceed the strategy's ceiling.

    References:
        Mellempudi et al. 2019, Mixed Precision Training With 8-bit Floating Point
        (https://arxiv.org/abs/1905.12334), "enhanced loss scaling".
    """

    strategy: Strategy
    floors: Mapping[int, float] | tuple[tuple[int, float], ...] = ((40_000, 8192.0), (150_000, 32768.0))

    def __post_init__(self) -> None:
        require_inner(self.strategy, "RisingFloor")
        pairs = as_schedule("floors", self.floors)
        for step, floor in pairs:
            if is_symbolic(floor):
                raise InvalidArgument(f"floors[{step}]={floor!r}: expected a Python number and not a tensor.")
            check_scale(f"floors[{step}]", floor)
        values = [float(floor) for _, floor in pairs]
        if values != sorted(values):
            raise InvalidArgument(f"floors={dict(pairs)!r}: expected floors that rise from step to step.")
        high = bounds_of(self.strategy)[1]
        if not is_symbolic(high) and values[-1] > high:
            raise InvalidArgument(f"floors={dict(pairs)!r}: expected none above the strategy's max_scale, {high:g}.")
        # A tuple keeps the strategy a value that can be hashed.
        object.__setattr__(self, "floors", pairs)

    def init(self) -> Any:
        """The state before the first step."""
        return self._raised(self.strategy.init(), tf.constant(0))

    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        inner = bounded_state(self.strategy, self.strategy.update(inner_of(state), event))
        return self._raised(inner, count_up(own_of(state)[0]))

    def _raised(self, inner: Any, steps: tf.Tensor) -> Any:
        """The state whose scale is raised to the floor of this step."""
        scale = inner.loss_scale
        for step, floor in self.floors:  # type: ignore[misc]
            scale = tf.where(steps >= step, tf.maximum(scale, float(floor)), scale)
        return join("RisingFloorState", inner._replace(loss_scale=scale), floor_steps=steps)


@dataclasses.dataclass(frozen=True)
class Warmup(AroundWithBounds):
    """Keep the loss scale below a ceiling that rises to another strategy's in the first steps.

        target:   the strategy's own scale; it sees what it would see without a warmup
        rise:     max(floor(log2(target / initial_scale)), 0)
        scale:    min(target, initial_scale * 2^floor(t * rise / steps)) while t < steps, target from then on
        non-finite while t < steps: the strategy goes on from the scale that was used, which is too large already

    t counts the steps seen, from 0: attempted steps without spikes and, unless the strategy sees every step, without
    those that were skipped because of their loss. The first gradients of a network are often its largest: a scale that
    fits the rest of the training would overflow in the first steps, one after the other.

    It rises to the strategy's own scale, whatever the scale was before it began: also in the middle of a `Scheduled`,
    and after a checkpoint of another strategy was restored into it.

    The state is the strategy's, with `target_scale` (scalar float32) and `warmup_steps` (scalar int32), the steps
    seen so far.

    Args:
        strategy: Any strategy.
        steps: Steps seen until its scale is used as it is, at least 1.
        initial_scale: Loss scale of the first step, a power of two of at least 2^-126 and at most the strategy's
            `max_scale`.

    Raises:
        InvalidArgument: For a number outside these ranges, or an object that is not a strategy.
    """

    strategy: Strategy
    steps: int
    _: dataclasses.KW_ONLY
    initial_scale: float = 1.0

    def __post_init__(self) -> None:
        require_inner(self.strategy, "Warmup")
        if is_symbolic(self.steps):
            raise InvalidArgument("Warmup(steps=...): expected a Python integer and not a tensor.")
        check_count("steps", self.steps, 1000)
        check_constant("initial_scale", self.initial_scale, "a power of two", lambda v: math.frexp(v)[0] == 0.5)
        check_scale("initial_scale", self.initial_scale)
        high = bounds_of(self.strategy)[1]
        if not is_symbolic(high) and self.initial_scale > high:
            raise InvalidArgument(
                f"initial_scale={self.initial_scale!r}: expected at most the strategy's max_scale, {high:g}."
            )

    @property
    def min_scale(self) -> Any:
        """The strategy's floor, or `initial_scale` if that is lower."""
        low = bounds_of(self.strategy)[0]
        return tf.minimum(low, self.initial_scale) if is_symbolic(low) else min(low, self.initial_scale)

    def init(self) -> Any:
        """The state before the first step."""
        return self._limited(bounded_state(self.strategy, self.strategy.init()), tf.constant(0))

    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        target, steps = own_of(state)
        inner = inner_of(state)
        own = tf.logical_and(steps < self.steps, event.finite)
        inner = inner._replace(loss_scale=tf.where(own, target, inner.loss_scale))
        return self._limited(bounded_state(self.strategy, self.strategy.update(inner, event)), count_up(steps))

    def _limited(self, inner: Any, steps: tf.Tensor) -> Any:
        """The state whose scale is lowered to the ceiling of this step."""
        first = int(math.log2(self.initial_scale))
        rise = tf.maximum(exact.exponent(inner.loss_scale) - first, 0)
        ceiling = exact.power_of_two(first + rise * tf.cast(steps, tf.int64) // self.steps)
        used = tf.where(steps < self.steps, tf.minimum(inner.loss_scale, ceiling), inner.loss_scale)
        return join("WarmupState", inner._replace(loss_scale=used), target_scale=inner.loss_scale, warmup_steps=steps)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """Change the strategy at given steps.

        active = strategies[the greatest key <= t]
        state[active] = active.update(state[active], event); t += 1
        at the step of a key: the next strategy starts from its own init(), with the current scale in its bounds

    t counts the steps seen, from 0: attempted steps without spikes and, unless all of the strategies see every step,
    without those that were skipped because of their loss. A strategy that computes its scale from past statistics
    starts without them.

    The state has `loss_scale`, `schedule_steps` (scalar int32), the steps seen so far, and the other fields of
    every strategy, with its number as a suffix: `good_steps_0`, `budget_0`, ...

    Args:
        strategies: Strategies by the step they start at, one of them at 0.

    Raises:
        InvalidArgument: If none starts at 0, one is not a strategy, or they want different histograms.
    """

    strategies: Mapping[int, Strategy] | tuple[tuple[int, Strategy], ...]

    def __post_init__(self) -> None:
        pairs = as_schedule("strategies", self.strategies)
        for _, strategy in pairs:
            require_inner(strategy, "Scheduled")
        if pairs[0][0] != 0:
            raise InvalidArgument(f"strategies={dict(pairs)!r}: expected one that starts at step 0.")
        together(*(needs_of(strategy) for _, strategy in pairs))
        # A tuple keeps the strategy a value that can be hashed.
        object.__setattr__(self, "strategies", pairs)

    @property
    def int64_counts(self) -> bool:
        """Whether all of the strategies can count in int64."""
        return all(map(takes_int64, self._members()))

    @property
    def sees_every_step(self) -> bool:
        """Whether all of the strategies do."""
        return all(map(sees_every_step, self._members()))

    @property
    def needs(self) -> Needs:
        """What all of the strategies need together."""
        return together(*(needs_of(strategy) for strategy in self._members()))

    @property
    def min_scale(self) -> Any:
        """The lowest of the strategies' floors."""
        lows = [bounds_of(strategy)[0] for strategy in self._members()]
        return tf.reduce_min(tf.stack(list(map(as_float, lows)))) if any(map(is_symbolic, lows)) else min(lows)

    @property
    def max_scale(self) -> Any:
        """The highest of the strategies' ceilings."""
        highs = [bounds_of(strategy)[1] for strategy in self._members()]
        return tf.reduce_max(tf.stack(list(map(as_float, highs)))) if any(map(is_symbolic, highs)) else max(highs)

    def init(self) -> Any:
        """The state before the first step: every strategy's, and the first one's scale."""
        states = [bounded_state(strategy, strategy.init()) for strategy in self._members()]
        return self._together(states[0].loss_scale, tf.constant(0), states)

    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        before, scale, steps = self._apart(state), state.loss_scale, count_up(state.schedule_steps)
        active = self._active(state.schedule_steps)
        states = []
        for number, (strategy, old) in enumerate(zip(self._members(), before, strict=True)):
            new, acts = bounded_state(strategy, strategy.update(old, event)), tf.equal(active, number)
            states.append(type(old)(*(tf.where(acts, after, was) for after, was in zip(new, old, strict=True))))
            scale = tf.where(acts, new.loss_scale, scale)
        following = self._active(steps)
        for number, strategy in enumerate(self._members()):
            scale = tf.where(tf.equal(following, number), bounded(strategy, scale), scale)
        return self._together(scale, steps, states)

    def _members(self) -> list[Strategy]:
        """The strategies in the order of their steps."""
        return [strategy for _, strategy in self.strategies]  # type: ignore[misc]

    def _active(self, steps: tf.Tensor) -> tf.Tensor:
        """The number of the strategy that is active after so many steps."""
        started = [tf.cast(steps >= start, tf.int64) for start, _ in self.strategies]  # type: ignore[misc]
        return tf.add_n(started) - 1

    def _together(self, scale: tf.Tensor, steps: tf.Tensor, states: list) -> Any:
        """One flat state of the states of all strategies."""
        fields = {"loss_scale": scale, "schedule_steps": steps}
        for number, state in enumerate(states):
            own = {f"{field}_{number}": value for field, value in state._asdict().items() if field != "loss_scale"}
            fields.update(own)
        return join("ScheduledState", (), **fields)

    def _apart(self, state: Any) -> list:
        """The states of all strategies, with the scale in use."""
        states = []
        for number, strategy in enumerate(self._members()):
            example = strategy.init()
            fields = {field: getattr(state, f"{field}_{number}") for field in example._fields if field != "loss_scale"}
            states.append(type(example)(**{**fields, "loss_scale": state.loss_scale}))
        return states
