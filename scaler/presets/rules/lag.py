"""A scale that comes into use one step after it was decided: MXNet's rule."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.strategies.base import Event
from scaler.strategies.dynamic import Dynamic, DynamicState
from scaler.strategies.nested import AroundWithBounds


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
