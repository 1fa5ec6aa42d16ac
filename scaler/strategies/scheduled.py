"""One strategy after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from scaler.checks import as_float, is_symbolic
from scaler.errors import InvalidArgument
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
from scaler.strategies.nested import as_schedule, count_up, state_of_fields


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
        return state_of_fields("ScheduledState", fields)

    def _apart(self, state: Any) -> list:
        """The states of all strategies, with the scale in use."""
        states = []
        for number, strategy in enumerate(self._members()):
            example = strategy.init()
            fields = {field: getattr(state, f"{field}_{number}") for field in example._fields if field != "loss_scale"}
            states.append(type(example)(**{**fields, "loss_scale": state.loss_scale}))
        return states
