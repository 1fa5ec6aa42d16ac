"""No loss scale, but the same decision to apply or skip."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.strategies.base import Event
from scaler.strategies.static import StaticState


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
