"""Doubling at every step until something overflows, a slow climb ever after: Chainer's rule."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import check_count
from scaler.presets.rules.precision import as_double, held
from scaler.strategies.base import Event


class FirstOverflowState(NamedTuple):
    """State of `FirstOverflow`.

    Attributes:
        loss_scale: Scalar float32, in [1, 65504].
        exact_scale: Scalar float64, which `loss_scale` is rounded from.
        overflowed: Scalar bool, whether any step was non-finite yet.
    """

    loss_scale: tf.Tensor
    exact_scale: tf.Tensor
    overflowed: tf.Tensor


@dataclasses.dataclass(frozen=True)
class FirstOverflow:
    """Search fast, then climb slowly.

        finite:      before the first non-finite step: scale = scale * 2, after it scale * 2^(1 / interval)
        non-finite:  scale = scale / 2
        both:        scale = min(max(scale, 1), 65504); it starts at 1

    Args:
        interval: Finite steps to a doubling, at least 1.

    Raises:
        InvalidArgument: For a number outside the range above.
    """

    interval: int = 1000
    min_scale = 1.0
    max_scale = 65504.0
    int64_counts: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("interval", self.interval, 1000)

    def init(self) -> FirstOverflowState:
        """The state before the first step."""
        return FirstOverflowState(tf.constant(1.0), as_double(1.0), tf.constant(False))

    def update(self, state: FirstOverflowState, event: Event) -> FirstOverflowState:
        """The state after a step that was attempted with `state` and showed `event`."""
        climb = tf.where(state.overflowed, as_double(math.pow(2.0, 1.0 / self.interval)), as_double(2.0))
        scale = held(state.loss_scale, state.exact_scale) * tf.where(event.finite, climb, as_double(0.5))
        exact = tf.clip_by_value(scale, as_double(self.min_scale), as_double(self.max_scale))
        return FirstOverflowState(
            loss_scale=tf.cast(exact, tf.float32),
            exact_scale=exact,
            overflowed=tf.logical_or(state.overflowed, tf.logical_not(event.finite)),
        )
