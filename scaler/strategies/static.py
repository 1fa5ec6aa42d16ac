"""A loss scale that never changes.

No loss scale, but the same decision to apply or skip.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.checks import as_float, check_scale
from scaler.strategies.base import Event


class StaticState(NamedTuple):
    """State of `Static` and `NoScaling`.

    Attributes:
        loss_scale: Scalar float32.
    """

    loss_scale: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Static:
    """Scale by a constant.

        finite:      nothing changes
        non-finite:  nothing changes; the step is skipped

    Choose a power of two: then scaling and unscaling change exponents only, and no bit of a gradient. Too small a scale
    skips nothing, and float16 makes small gradients zero: `halfstep.observe.find_scale` counts those of each layer.

    Args:
        loss_scale: A number in [2^-126, 2^126].

    Raises:
        InvalidArgument: For any other value.

    References:
        Micikevicius et al. 2018, Mixed Precision Training, section 3.2 (https://arxiv.org/abs/1710.03740).
    """

    loss_scale: float
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale("loss_scale", self.loss_scale)

    @property
    def min_scale(self) -> float:
        """The scale itself: no checkpoint can bring another."""
        return self.loss_scale

    max_scale = min_scale

    def init(self) -> StaticState:
        """The state before the first step."""
        return StaticState(as_float(self.loss_scale))

    @no_autograph
    def update(self, state: StaticState, event: Event) -> StaticState:
        """The same state."""
        del event
        return state


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """Scale by 1: for float32 and bfloat16, or as a baseline.

    finite:      nothing changes
    non-finite:  nothing changes; the step is skipped, as with every strategy
    """

    min_scale: ClassVar[float] = 1.0
    max_scale: ClassVar[float] = 1.0
    int64_counts: ClassVar[bool] = True

    def init(self) -> StaticState:
        """The state before the first step: a loss scale of 1."""
        return StaticState(tf.constant(1.0, tf.float32))

    @no_autograph
    def update(self, state: StaticState, event: Event) -> StaticState:
        """The same state."""
        del event
        return state
