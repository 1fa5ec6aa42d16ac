"""A scale kept as its logarithm, that climbs at every finite step: guided-diffusion's rule."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.checks import check_number
from scaler.presets.rules.precision import as_double
from scaler.strategies.base import Event


class Log2State(NamedTuple):
    """State of `Log2`.

    Attributes:
        loss_scale: Scalar float32.
        log2_scale: Scalar float64, in [-126, 126].
    """

    loss_scale: tf.Tensor
    log2_scale: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Log2:
    """Climb by a fraction of an octave, fall by a whole one.

        finite:      log2_scale = log2_scale + growth
        non-finite:  log2_scale = log2_scale - 1
        both:        log2_scale = min(max(log2_scale, -126), 126); scale = 2^log2_scale

    Args:
        initial_log2_scale: Of the first step, in [-126, 126].
        growth: Octaves a finite step, in [0, 126].

    Raises:
        InvalidArgument: For a number outside the ranges above.
    """

    initial_log2_scale: float = 20.0
    _: dataclasses.KW_ONLY
    growth: float = 1e-3
    int64_counts: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(
            "initial_log2_scale", self.initial_log2_scale, "a number in [-126, 126]", lambda v: -126 <= v <= 126
        )
        check_number("growth", self.growth, "a number in [0, 126]", lambda v: 0 <= v <= 126)

    def init(self) -> Log2State:
        """The state before the first step."""
        return _state(as_double(self.initial_log2_scale))

    def update(self, state: Log2State, event: Event) -> Log2State:
        """The state after a step that was attempted with `state` and showed `event`."""
        # A scale that was changed from outside counts, not what its logarithm was before.
        of_scale = tf.math.log(tf.cast(state.loss_scale, tf.float64)) / as_double(math.log(2.0))
        log2_scale = tf.where(
            tf.equal(_state(state.log2_scale).loss_scale, state.loss_scale), state.log2_scale, of_scale
        )
        step = tf.where(event.finite, as_double(self.growth), as_double(-1.0))
        return _state(tf.clip_by_value(log2_scale + step, as_double(-126.0), as_double(126.0)))


def _state(log2_scale: tf.Tensor) -> Log2State:
    # The whole octaves become the exponent's bits: pow itself need not be exact at them.
    whole = tf.floor(log2_scale)
    bits = tf.bitwise.left_shift(tf.cast(whole, tf.int64) + 1023, tf.constant(52, tf.int64))
    scale = tf.pow(as_double(2.0), log2_scale - whole) * tf.bitcast(bits, tf.float64)
    return Log2State(tf.cast(scale, tf.float32), log2_scale)
