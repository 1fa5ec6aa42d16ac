"""Any strategy, between other bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

from scaler.checks import check_bounds
from scaler.strategies.base import Event, Needs, Strategy, bounded, needs_of, require_inner, takes_int64


@dataclasses.dataclass(frozen=True)
class Bounded:
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

    @property
    def int64_counts(self) -> bool:
        """Whether the strategy can count in int64."""
        return takes_int64(self.strategy)

    @property
    def needs(self) -> Needs:
        """What the strategy needs."""
        return needs_of(self.strategy)

    def init(self) -> Any:
        """The strategy's state before the first step, bounded."""
        return self._within(self.strategy.init())

    def update(self, state: Any, event: Event) -> Any:
        """The strategy's state after a step, bounded."""
        return self._within(self.strategy.update(self._within(state), event))

    def _within(self, state: Any) -> Any:
        return state._replace(loss_scale=bounded(self, state.loss_scale))
