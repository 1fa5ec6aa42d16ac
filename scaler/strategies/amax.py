"""Loss scales that follow the largest gradient: of the last steps, at a learnt distance, or by a model of it."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.formats import float_format
from scaler.checks import (
    as_count,
    as_float,
    check_bounds,
    check_constant,
    check_count,
    check_flag,
    check_number,
    is_symbolic,
    within,
)
from scaler.errors import InvalidArgument
from scaler.strategies import exact
from scaler.strategies.base import Event, Needs, amax_of, bounded, first_scale

_ALGORITHMS = ("max", "most_recent")


class DelayedAmaxState(NamedTuple):
    """State of `DelayedAmax`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        history: Float32 [history_length], amax of the last steps, the newest last; 0 where there was none yet.
    """

    loss_scale: tf.Tensor
    history: tf.Tensor


@dataclasses.dataclass(frozen=True)
class DelayedAmax:
    """Scale the largest magnitude of the last steps to the format's maximum (FP8 delayed scaling).

        history:     drop the oldest, append amax             amax of the unscaled gradients
        largest:     max(history), or the newest
        scale:       (format_max / largest) / 2^margin, down to a power of two, within the bounds;
                     as it was while largest = 0
        non-finite:  append 2 * format_max / (scale * 2^margin): the scale is halved, for as long as this is remembered

    The original scales single tensors before a cast that saturates, and ignores an amax that is not finite. Behind a
    loss scale an overflow is information: at this scale something was larger than the format. That is what a
    non-finite step appends. Unrounded, as in the original, with power_of_two=False.

    It sees the gradients of the *weights* only. In float16 those of activations overflow first: give it a margin.

    Args:
        initial_scale: Loss scale until the first observation, in [min_scale, max_scale].
        format: Whose maximum to scale to, as `float_format` takes it: "float16", "float8_e5m2", "float8_e4m3fn", ...
        margin: Octaves of distance from the maximum, a whole number in [0, 64].
        history_length: Steps remembered, at least 1.
        algorithm: "max" of the history, or "most_recent".
        power_of_two: Whether the scale is rounded down to a power of two, so that scaling is exact.
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    The bounds may also be scalar tensors or variables, which are not checked.

    Raises:
        InvalidArgument: For a value outside the ranges above; in `update` for an event without amax.

    References:
        Micikevicius et al. 2022, FP8 Formats for Deep Learning (https://arxiv.org/abs/2209.05433); defaults and formula
        from NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py (DelayedScaling) and
        transformer_engine/pytorch/quantization.py. The power of two is that of Azure/MS-AMP,
        msamp/common/tensor/meta.py.
    """

    initial_scale: float = 1.0
    _: dataclasses.KW_ONLY
    format: str = "float16"
    margin: int = 0
    history_length: int = 1024
    algorithm: str = "max"
    power_of_two: bool = True
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    needs: ClassVar[Needs] = Needs(amax=True)
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        float_format(self.format)
        check_constant("margin", self.margin, "whole octaves in [0, 64]", lambda v: 0 <= v <= 64 and v == int(v))
        check_count("history_length", self.history_length, 1024)
        if is_symbolic(self.history_length) or is_symbolic(self.power_of_two):
            raise InvalidArgument("history_length and power_of_two: expected Python values and not tensors.")
        if self.algorithm not in _ALGORITHMS:
            raise InvalidArgument(f"algorithm={self.algorithm!r}: expected one of {', '.join(_ALGORITHMS)}.")
        check_flag("power_of_two", self.power_of_two)

    def init(self) -> DelayedAmaxState:
        """The state before the first step."""
        return DelayedAmaxState(first_scale(self), tf.zeros([self.history_length]))

    @no_autograph
    def update(self, state: DelayedAmaxState, event: Event) -> DelayedAmaxState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, amax = amax_of(self, event)
        limit, margin = tf.constant(float_format(self.format).max, tf.float32), 2.0 ** -int(self.margin)
        # Kernels disagree on subnormal numbers, and the largest float32 is its own double.
        exceeded = tf.minimum((limit / state.loss_scale) * (2.0 * margin), 2.0**127)
        seen = tf.where(finite, tf.where(exact.power_of_two_at_most(amax) > 0.0, amax, 0.0), exceeded)
        history = tf.concat([state.history[1:], seen[tf.newaxis]], axis=0)
        largest = tf.reduce_max(history, axis=0) if self.algorithm == "max" else seen
        scale = (limit / tf.where(largest > 0.0, largest, 1.0)) * margin
        if self.power_of_two:
            scale = exact.power_of_two_at_most(scale)
        scale = tf.where(finite, scale, tf.minimum(scale, state.loss_scale))
        return DelayedAmaxState(bounded(self, tf.where(largest > 0.0, scale, state.loss_scale)), history)


_UNKNOWN = -1000


class HeadroomState(NamedTuple):
    """State of `Headroom`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        peak: Scalar int32: amax was below 2^peak lately; -1000 before the first observation.
        below_peak: Scalar int32, in [0, memory), observations since one was as high as the peak.
        distance: Scalar int32, octaves kept between peak and the format's maximum, at least `headroom`.
        calm: Scalar int32, in [0, relax_interval), finite steps since the last non-finite one or change of distance.
    """

    loss_scale: tf.Tensor
    peak: tf.Tensor
    below_peak: tf.Tensor
    distance: tf.Tensor
    calm: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Headroom:
    """Keep the largest gradient a few octaves below the format's maximum, and learn from overflows how many.

        finite:      e = floor(log2(amax)) + 1, unless amax = 0
                     e >= peak:                          peak = e
                     below it for `memory` steps:        peak -= 1, and so on after as many more
                     finite for `relax_interval` steps:  distance = max(distance - 1, headroom), and so on
                     scale = 2^(top - peak - distance)   top = ceil(log2(format_max)): 16 for float16
        non-finite:  scale = scale / 2
                     distance = the one that belongs to this scale, when a peak is known

    The scale moves with the gradients at once, up or down, without waiting out an interval or risking an overflow.
    But what overflows is rarely the gradient of a weight. It is that of an activation, which is not measured: so an
    overflow says that the distance is too small, and the distance grows by an octave until `relax_interval` finite
    steps have passed. The scale is always a power of two, within the bounds.

    The defaults were chosen on recorded traces of a small network; `benchmarks/headroom.py --tune` shows them among a
    hundred others, and without `--tune` where this beats `Dynamic` and where it loses.

    Args:
        initial_scale: Loss scale until the first observation, in [min_scale, max_scale].
        headroom: Least distance in octaves, at least 1.
        memory: Observations after which a peak that was not reached again is an octave lower.
        relax_interval: Finite steps after which a greater distance is tried an octave smaller.
        format: Of the gradients, as `float_format` takes it.
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    Every number may also be a scalar tensor or variable, which is not checked.

    Raises:
        InvalidArgument: For a value outside the ranges above; in `update` for an event without amax.
    """

    initial_scale: float = 2.0**15
    _: dataclasses.KW_ONLY
    headroom: int = 1
    memory: int = 100
    relax_interval: int = 300
    format: str = "float16"
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    needs: ClassVar[Needs] = Needs(amax=True)
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        for name, example in (("headroom", 1), ("memory", 100), ("relax_interval", 300)):
            check_count(name, getattr(self, name), example)
        float_format(self.format)

    def init(self) -> HeadroomState:
        """The state before the first step."""
        zero = tf.constant(0)
        loss_scale = bounded(self, exact.power_of_two_at_most(as_float(self.initial_scale)))
        return HeadroomState(loss_scale, tf.constant(_UNKNOWN), zero, tf.cast(self.headroom, tf.int32), zero)

    @no_autograph
    def update(self, state: HeadroomState, event: Event) -> HeadroomState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, amax = amax_of(self, event)
        top = math.ceil(math.log2(float_format(self.format).max))
        peak, below_peak = self._peak(state, finite, amax)
        distance, calm = self._relaxed(state)
        known = peak > _UNKNOWN
        followed = tf.where(known, exact.power_of_two(top - peak - distance), state.loss_scale)
        halved = bounded(self, state.loss_scale * 0.5)
        implied = tf.maximum(top - peak - tf.cast(exact.exponent(halved), peak.dtype), as_count(self.headroom, peak))
        return HeadroomState(
            loss_scale=bounded(self, tf.where(finite, followed, halved)),
            peak=peak,
            below_peak=below_peak,
            distance=tf.where(finite, distance, tf.where(known, implied, state.distance)),
            calm=tf.where(finite, calm, tf.zeros_like(calm)),
        )

    def _peak(self, state: HeadroomState, finite: tf.Tensor, amax: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The next `peak` and `below_peak`."""
        height = exact.exponent(amax) + 1
        observed = tf.logical_and(finite, height > -126)
        known, memory = within(state.peak, _UNKNOWN, 128), as_count(self.memory, state.below_peak)
        height = tf.cast(height, known.dtype)
        reached = height >= known
        below = within(state.below_peak, 0, memory - 1) + 1
        forget = below >= memory
        peak = tf.where(reached, height, tf.where(forget, known - 1, known))
        below = tf.where(tf.logical_or(reached, forget), tf.zeros_like(below), below)
        return tf.where(observed, peak, known), tf.where(observed, below, state.below_peak)

    def _relaxed(self, state: HeadroomState) -> tuple[tf.Tensor, tf.Tensor]:
        """The next `distance` and `calm`, of a finite step."""
        least, interval = as_count(self.headroom, state.distance), as_count(self.relax_interval, state.calm)
        calm = within(state.calm, 0, interval - 1) + 1
        relax = calm >= interval
        distance = within(state.distance, least, least + 512)
        return tf.maximum(tf.where(relax, distance - 1, distance), least), tf.where(relax, tf.zeros_like(calm), calm)


class LogNormalState(NamedTuple):
    """State of `LogNormal`: exponential averages of x = log2(amax), not yet divided by 1 - their weight.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        mean: Scalar float32, of x with mean_decay.
        mean_weight: Scalar float32, mean_decay to the power of the observations so far.
        slow_mean: Scalar float32, of x with variance_decay.
        slow_square: Scalar float32, of x^2 with variance_decay.
        slow_weight: Scalar float32, variance_decay to the power of the observations so far.
    """

    loss_scale: tf.Tensor
    mean: tf.Tensor
    mean_weight: tf.Tensor
    slow_mean: tf.Tensor
    slow_square: tf.Tensor
    slow_weight: tf.Tensor


@dataclasses.dataclass(frozen=True)
class LogNormal:
    """Take the largest gradient for log-normal, and scale it so that it rarely overflows ("LogMax").

        x = log2(amax)                                        amax of the unscaled gradients
        m = b1 m + (1 - b1) x;  mu = m / (1 - b1^t)           b1 = mean_decay, t = observations
        s = b2 s + (1 - b2) x;  q = b2 q + (1 - b2) x^2       b2 = variance_decay, both divided by 1 - b2^t
        sigma = sqrt(max(q - s^2, 0))
        scale = 2^(log_max - (mu + deviations * sigma)), within the bounds

    With 3.09 deviations one step in a thousand would overflow, if the model held for the gradients that overflow. But
    it describes the gradients of the *weights*; those of activations are not measured, and may be larger.

    The published rule does not survive its first overflow: a non-finite step counts as x = 2^log_max where log_max is
    meant, which holds the scale at its floor for ten thousand steps; all-zero gradients count as x = -inf, and the
    scale is NaN from then on; log_max is 16 whatever was asked for. The default is a repaired rule:

        non-finite:  counts as x = log_max; the scale does not rise
        amax = 0:    does not count as an observation; nothing changes
        scale:       the power of two at or below the formula's, so that scaling is exact

    With repaired=False it is the published rule, except that a scale that would be NaN stays as it was.

    Args:
        initial_scale: Loss scale until the first observation, in [min_scale, max_scale].
        log_max: Log2 of what must not be exceeded: 16 for float16, in [-126, 126].
        mean_decay: In (0, 1).
        variance_decay: In (0, 1).
        deviations: Standard deviations of distance kept from log_max, in [0, 1000].
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.
        repaired: False for the published rule.

    Every number may also be a scalar tensor or variable, which is not checked.

    Raises:
        InvalidArgument: For a number outside the ranges above; in `update` for an event without amax.

    References:
        Kuchaiev et al. 2018, OpenSeq2Seq (https://arxiv.org/abs/1805.10387); defaults and faults from
        NVIDIA/OpenSeq2Seq, open_seq2seq/optimizers/automatic_loss_scaler.py, class LogMaxScaler.
    """

    initial_scale: float = 1.0
    _: dataclasses.KW_ONLY
    log_max: float = 16.0
    mean_decay: float = 0.99
    variance_decay: float = 0.999
    deviations: float = 3.09
    min_scale: float = 1.0
    max_scale: float = 2.0**14
    repaired: bool = True
    needs: ClassVar[Needs] = Needs(amax=True)
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        check_number("log_max", self.log_max, "a number in [-126, 126]", lambda v: -126 <= v <= 126)
        for name in ("mean_decay", "variance_decay"):
            check_number(name, getattr(self, name), "a number in (0, 1)", lambda v: 0 < v < 1)
        check_number("deviations", self.deviations, "a number in [0, 1000]", lambda v: 0 <= v <= 1000)
        check_flag("repaired", self.repaired)

    def init(self) -> LogNormalState:
        """The state before the first step."""
        zero, one = tf.constant(0.0), tf.constant(1.0)
        return LogNormalState(first_scale(self), zero, one, zero, zero, one)

    @no_autograph
    def update(self, state: LogNormalState, event: Event) -> LogNormalState:
        """The state after a step that was attempted with `state` and showed `event`."""
        (finite, amax), log_max = amax_of(self, event), as_float(self.log_max)
        x = tf.cast(exact.log2(amax), tf.float32)
        observed = tf.logical_or(tf.logical_not(finite), x > -math.inf)
        if self.repaired:
            x = tf.where(finite, x, log_max)
        else:
            x, observed = tf.where(finite, x, exact.exp2(exact.wide(log_max))), tf.ones_like(observed)
            log_max = tf.constant(16.0)
        after = self._average(state, x)
        scale = self._scale(after, log_max, state.loss_scale)
        if self.repaired:
            scale = tf.where(finite, scale, tf.minimum(scale, state.loss_scale))
        after = after._replace(loss_scale=bounded(self, scale))
        return LogNormalState(*(tf.where(observed, new, old) for new, old in zip(after, state, strict=True)))

    def _average(self, state: LogNormalState, x: tf.Tensor) -> LogNormalState:
        """The averages with one more observation."""
        fast, slow = as_float(self.mean_decay), as_float(self.variance_decay)
        return LogNormalState(
            state.loss_scale,
            _ema(state.mean, fast, x),
            exact.narrow(exact.wide(state.mean_weight) * exact.wide(fast)),
            _ema(state.slow_mean, slow, x),
            _ema(state.slow_square, slow, tf.square(x)),
            exact.narrow(exact.wide(state.slow_weight) * exact.wide(slow)),
        )

    def _scale(self, state: LogNormalState, log_max: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        """The scale that the averages allow; the one before where they say nothing."""
        mu, slow_mu = _corrected(state.mean, state.mean_weight), _corrected(state.slow_mean, state.slow_weight)
        square = _corrected(state.slow_square, state.slow_weight)
        variance = exact.wide(square) - tf.square(exact.wide(slow_mu))
        sigma = exact.narrow(tf.sqrt(tf.maximum(variance, tf.zeros_like(variance))))
        cutoff = exact.wide(mu) + exact.wide(as_float(self.deviations)) * exact.wide(sigma)
        logarithm = exact.wide(log_max) - cutoff
        known = tf.logical_not(tf.math.is_nan(logarithm))
        logarithm = tf.where(known, logarithm, tf.zeros_like(logarithm))
        return tf.where(known, exact.exp2(tf.floor(logarithm) if self.repaired else logarithm), before)


def _ema(average: tf.Tensor, decay: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """An exponential average with one more value."""
    return exact.narrow(exact.wide(decay) * exact.wide(average) + exact.wide(1.0 - decay) * exact.wide(x))


def _corrected(average: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """An average divided by what its weights sum to."""
    return exact.narrow(exact.wide(average) / (1.0 - exact.wide(weight)))
