"""Any strategy, above a floor that rises as the training goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from scaler.checks import check_scale, is_symbolic
from scaler.errors import InvalidArgument
from scaler.strategies.base import (
    Event,
    Needs,
    Strategy,
    bounded_state,
    bounds_of,
    needs_of,
    require_inner,
    takes_int64,
)
from scaler.strategies.nested import as_schedule, count_up, inner_of, join, own_of


@dataclasses.dataclass(frozen=True)
class RisingFloor:
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

    @property
    def int64_counts(self) -> bool:
        """Whether the strategy can count in int64."""
        return takes_int64(self.strategy)

    @property
    def needs(self) -> Needs:
        """What the strategy needs."""
        return needs_of(self.strategy)

    @property
    def min_scale(self) -> Any:
        """The strategy's own floor."""
        return bounds_of(self.strategy)[0]

    @property
    def max_scale(self) -> Any:
        """The strategy's own ceiling."""
        return bounds_of(self.strategy)[1]

    def init(self) -> Any:
        """The state before the first step."""
        return self._raised(self.strategy.init(), tf.constant(0))

    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        inner = bounded_state(self.strategy, self.strategy.update(inner_of(state), event))
        return self._raised(inner, count_up(own_of(state)[0]))

    def _raised(self, inner: Any, steps: tf.Tensor) -> Any:
        scale = inner.loss_scale
        for step, floor in self.floors:  # type: ignore[misc]
            scale = tf.where(steps >= step, tf.maximum(scale, float(floor)), scale)
        return join("RisingFloorState", inner._replace(loss_scale=scale), floor_steps=steps)
