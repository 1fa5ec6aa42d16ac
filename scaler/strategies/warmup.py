"""Any strategy, with a loss scale that rises slowly at first."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from scaler.checks import check_constant, check_count, check_scale, is_symbolic
from scaler.errors import InvalidArgument
from scaler.strategies import exact
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
from scaler.strategies.nested import count_up, inner_of, join, own_of


@dataclasses.dataclass(frozen=True)
class Warmup:
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
    def int64_counts(self) -> bool:
        """Whether the strategy can count in int64."""
        return takes_int64(self.strategy)

    @property
    def needs(self) -> Needs:
        """What the strategy needs."""
        return needs_of(self.strategy)

    @property
    def min_scale(self) -> Any:
        """The strategy's floor, or `initial_scale` if that is lower."""
        low = bounds_of(self.strategy)[0]
        return tf.minimum(low, self.initial_scale) if is_symbolic(low) else min(low, self.initial_scale)

    @property
    def max_scale(self) -> Any:
        """The strategy's ceiling."""
        return bounds_of(self.strategy)[1]

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
        first = int(math.log2(self.initial_scale))
        rise = tf.maximum(exact.exponent(inner.loss_scale) - first, 0)
        ceiling = exact.power_of_two(first + rise * tf.cast(steps, tf.int64) // self.steps)
        used = tf.where(steps < self.steps, tf.minimum(inner.loss_scale, ceiling), inner.loss_scale)
        return join("WarmupState", inner._replace(loss_scale=used), target_scale=inner.loss_scale, warmup_steps=steps)
