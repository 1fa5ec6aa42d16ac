"""A climb at every finite step, and backoffs that keep their distance: DALL-E's rule."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import as_count, check_count
from scaler.presets.rules.precision import as_double, held
from scaler.strategies.base import Event


class SpacedState(NamedTuple):
    """State of `Spaced`.

    Attributes:
        loss_scale: Scalar float32.
        exact_scale: Scalar float64, which `loss_scale` is rounded from.
        wait: Scalar int32, in [0, 124], steps that do not back off any more.
    """

    loss_scale: tf.Tensor
    exact_scale: tf.Tensor
    wait: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Spaced:
    """Climb slowly, back off a little, and not again at once.

        every step:  wait = max(wait - 1, 0)
        finite:      scale = scale * 2^(1/1000)
        non-finite:  when wait == 0: scale = scale / sqrt(2); wait = 125
        both:        scale = min(max(scale, replicas * 2^7), replicas * 2^24); it starts at replicas * 2^13

    Args:
        replicas: At least 1.

    Raises:
        InvalidArgument: For a number outside the range above.
    """

    replicas: int = 1
    int64_counts: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("replicas", self.replicas, 1)

    @property
    def min_scale(self) -> float:
        """The floor, 2^7 for each replica."""
        return self.replicas * 2.0**7

    @property
    def max_scale(self) -> float:
        """The ceiling, 2^24 for each replica."""
        return self.replicas * 2.0**24

    def init(self) -> SpacedState:
        """The state before the first step."""
        exact = as_double(self.replicas * 2.0**13)
        return SpacedState(tf.cast(exact, tf.float32), exact, tf.constant(0, tf.int32))

    def update(self, state: SpacedState, event: Event) -> SpacedState:
        """The state after a step that was attempted with `state` and showed `event`."""
        wait = tf.clip_by_value(state.wait - 1, 0, _DISTANCE - 1)
        back_off = tf.logical_and(tf.logical_not(event.finite), wait <= 0)
        stays = tf.where(event.finite, as_double(_CLIMB), as_double(1.0))
        one = as_double(1.0)
        scale = held(state.loss_scale, state.exact_scale) * stays / tf.where(back_off, as_double(math.sqrt(2.0)), one)
        exact = tf.clip_by_value(scale, as_double(self.min_scale), as_double(self.max_scale))
        return SpacedState(tf.cast(exact, tf.float32), exact, tf.where(back_off, as_count(_DISTANCE, wait), wait))


_CLIMB = math.pow(2.0, 1.0 / 1000)
_DISTANCE = 125
