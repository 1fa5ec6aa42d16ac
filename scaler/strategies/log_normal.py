"""The loss scale that a model of the largest gradient allows."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.checks import as_float, check_bounds, check_flag, check_number
from scaler.strategies import exact
from scaler.strategies.base import Event, Needs, amax_of, bounded, first_scale


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
