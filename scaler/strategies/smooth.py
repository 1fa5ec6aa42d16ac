"""The loss scale that rises a little at every step."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.checks import (
    as_count,
    check_backoff_factor,
    check_bounds,
    check_count,
    check_flag,
    check_number,
    is_symbolic,
)
from scaler.strategies import exact
from scaler.strategies.base import Event, bounded, first_scale


class SmoothState(NamedTuple):
    """State of `Smooth`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale]: 2^log2_scale.
        log2_scale: Scalar float64. If loss_scale was changed from outside, this is computed from it
            again.
        since_backoff: Scalar int32, in [0, backoff_interval], steps since the last backoff, counted up to the interval.
        searching: Scalar bool, whether the scale still doubles at every finite step.
    """

    loss_scale: tf.Tensor
    log2_scale: tf.Tensor
    since_backoff: tf.Tensor
    searching: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Smooth:
    """Grow by a fraction of an octave at every finite step, back off at a non-finite one.

        finite:      log2_scale += 1 / growth_interval, or 1 while searching
        non-finite:  searching = False
                     when since_backoff >= backoff_interval: log2_scale += log2(backoff_factor); since_backoff = 0
        always:      since_backoff += 1; log2_scale within the bounds; scale = 2^log2_scale

    A family, by its members:

        guided-diffusion:  Smooth(2.0**20), the defaults, without bounds
        Chainer:           Smooth(1.0, search=True, min_scale=1.0, max_scale=65504.0)
        DALL-E:            Smooth(M * 2.0**13, backoff_factor=2**-0.5, backoff_interval=125,
                                  min_scale=M * 2.0**7, max_scale=M * 2.0**24), one for each block, M replicas

    The scale never waits for an interval to end, and overflows come one at a time, not after each doubling. The price:
    the scale is not a power of two, so scaling rounds each gradient once more.

    Args:
        initial_scale: Loss scale of the first step, in [min_scale, max_scale].
        growth_interval: Finite steps to a doubling, a number of at least 1.
        backoff_factor: Between 0 and 1, both excluded.
        backoff_interval: Least distance between two backoffs, in steps; non-finite steps in between are only skipped.
        search: Double at every finite step until the first non-finite one.
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    Every number may also be a scalar tensor or variable, which is not checked.

    Raises:
        InvalidArgument: For a number outside the ranges above.

    References:
        openai/guided-diffusion, guided_diffusion/fp16_util.py (MixedPrecisionTrainer); chainer/chainer,
        chainer/optimizer.py; Ramesh et al. 2021, DALL-E, appendix D (https://arxiv.org/abs/2102.12092).
    """

    initial_scale: float = 2.0**20
    _: dataclasses.KW_ONLY
    growth_interval: float = 1000
    backoff_factor: float = 0.5
    backoff_interval: int = 1
    search: bool = False
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        check_number("growth_interval", self.growth_interval, "a number in [1, 2^31)", lambda v: 1 <= v < 2.0**31)
        check_backoff_factor(self.backoff_factor)
        check_count("backoff_interval", self.backoff_interval, 125)
        check_flag("search", self.search)

    def init(self) -> SmoothState:
        """The state before the first step."""
        loss_scale = first_scale(self)
        interval = tf.cast(self.backoff_interval, tf.int32)
        return SmoothState(loss_scale, self._log2(self.initial_scale), interval, tf.convert_to_tensor(self.search))

    @no_autograph
    def update(self, state: SmoothState, event: Event) -> SmoothState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, interval = tf.convert_to_tensor(event.finite), as_count(self.backoff_interval, state.since_backoff)
        belongs = tf.equal(bounded(self, exact.exp2(state.log2_scale)), state.loss_scale)
        log2_scale = tf.where(belongs, state.log2_scale, exact.log2(state.loss_scale))
        back_off = tf.logical_and(tf.logical_not(finite), state.since_backoff >= interval)
        growth = tf.where(state.searching, tf.constant(1.0, tf.float64), self._growth())
        nothing = tf.constant(0.0, tf.float64)
        log2_scale += tf.where(finite, growth, tf.where(back_off, self._log2(self.backoff_factor), nothing))
        log2_scale = tf.clip_by_value(log2_scale, self._log2(self.min_scale), self._log2(self.max_scale))
        counted = tf.clip_by_value(state.since_backoff, 0, interval - 1)
        counted = tf.where(back_off, tf.zeros_like(counted), counted)
        return SmoothState(
            loss_scale=bounded(self, exact.exp2(log2_scale)),
            log2_scale=log2_scale,
            since_backoff=counted + 1,
            searching=tf.logical_and(state.searching, finite),
        )

    def _growth(self) -> tf.Tensor:
        """Octaves a finite step, float64."""
        interval = self.growth_interval
        if is_symbolic(interval):
            return 1.0 / tf.cast(interval, tf.float64)
        return tf.constant(1.0 / float(interval), tf.float64)

    def _log2(self, value: float | tf.Tensor) -> tf.Tensor:
        """The logarithm of an argument, float64."""
        return exact.log2(value) if is_symbolic(value) else tf.constant(math.log2(float(value)), tf.float64)
