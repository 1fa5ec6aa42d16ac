"""A scale that climbs at every finite step: the rules of Chainer, guided-diffusion and DALL-E."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from scaler.checks import as_count, check_count, check_number
from scaler.presets.rules.precision import EveryStep, after, as_double, change, first, held
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
class FirstOverflow(EveryStep):
    """Search fast, then climb slowly: Chainer's rule.

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

    def __post_init__(self) -> None:
        check_count("interval", self.interval, 1000)

    def init(self) -> FirstOverflowState:
        """The state before the first step."""
        return first(FirstOverflowState, 1.0, tf.constant(False))

    def update(self, state: FirstOverflowState, event: Event) -> FirstOverflowState:
        """The state after a step that was attempted with `state` and showed `event`."""
        climb = tf.where(state.overflowed, as_double(math.pow(2.0, 1.0 / self.interval)), as_double(2.0))
        scale = held(state) * tf.where(event.finite, climb, as_double(0.5))
        overflowed = tf.logical_or(state.overflowed, tf.logical_not(event.finite))
        return after(state, scale, self.min_scale, self.max_scale, overflowed=overflowed)


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
class Spaced(EveryStep):
    """Climb slowly, back off a little, and not again at once: DALL-E's rule.

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
        return first(SpacedState, self.replicas * 2.0**13, tf.constant(0, tf.int32))

    def update(self, state: SpacedState, event: Event) -> SpacedState:
        """The state after a step that was attempted with `state` and showed `event`."""
        wait = tf.clip_by_value(state.wait - 1, 0, _DISTANCE - 1)
        back_off = tf.logical_and(tf.logical_not(event.finite), wait <= 0)
        scale = change(change(held(state), event.finite, _CLIMB), back_off, 1.0, math.sqrt(2.0))
        wait = tf.where(back_off, as_count(_DISTANCE, wait), wait)
        return after(state, scale, self.min_scale, self.max_scale, wait=wait)


_CLIMB = math.pow(2.0, 1.0 / 1000)
_DISTANCE = 125


class Log2State(NamedTuple):
    """State of `Log2`.

    Attributes:
        loss_scale: Scalar float32.
        log2_scale: Scalar float64, in [-126, 126].
    """

    loss_scale: tf.Tensor
    log2_scale: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Log2(EveryStep):
    """Climb by a fraction of an octave, fall by a whole one: guided-diffusion's rule.

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
    """The state of a logarithm."""
    # The whole octaves become the exponent's bits: pow itself need not be exact at them.
    whole = tf.floor(log2_scale)
    bits = tf.bitwise.left_shift(tf.cast(whole, tf.int64) + 1023, tf.constant(52, tf.int64))
    scale = tf.pow(as_double(2.0), log2_scale - whole) * tf.bitcast(bits, tf.float64)
    return Log2State(tf.cast(scale, tf.float32), log2_scale)
