"""What a second backward pass tells of a skipped step: would a lower scale have helped?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import with_user_autograph
from scaler.backend.graphs import call_noninlined, traced_once
from scaler.backend.variables import choose
from scaler.checks import SMALLEST_SCALE
from scaler.outcome.outcome import Cause, Skip, int64

_LOW_SCALE = 2.0**-14
"""Where float16's backward pass can hardly overflow any more."""


def cause_from_second_pass(skip: Skip, loss_scale: tf.Tensor, floor: tf.Tensor, diagnose: Callable) -> Skip:
    """The reason of a skip, after a look at the gradients at lower scales where an overflow is presumed.

    To be called in the branch of a skip, on one replica, by what `replicas.merge` calls.

    Args:
        skip: The reason as the gate presumes it.
        loss_scale: Scalar float32, of the step.
        floor: Scalar float32, the strategy's.
        diagnose: From an output gradient to the gradients for it.
    """

    def in_replica(small: tf.Tensor) -> list:
        return replicas.map_replicas(tf.distribute.get_strategy(), with_user_autograph(diagnose), small)

    presumed, broken, backward = _looked(skip, loss_scale, floor, in_replica)
    return _corrected(skip, loss_scale, presumed, broken, backward)


def cause_from_second_pass_on_replicas(
    skip: Skip,
    loss_scale: tf.Tensor,
    floor: tf.Tensor,
    diagnose: Callable,
    correct: Callable[[tf.Tensor, tf.Tensor], None],
) -> Skip:
    """The same on several replicas: each takes the second pass by itself, after the decision that they share.

    `correct` is called once for all replicas with two scalar bools: whether the cause is BACKWARD, and whether a lower
    scale helps.
    """
    presumed, broken, backward = _looked(skip, loss_scale, floor, diagnose)

    def agree(strategy: tf.distribute.Strategy, broken: tf.Tensor, backward: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        broken, backward = replicas.any_of(strategy, broken), replicas.any_of(strategy, backward)
        found = _corrected(skip, loss_scale, presumed, broken, backward)
        correct(backward, found.lower_helps)
        return found.cause, found.lower_helps

    cause, helps = replicas.merge(agree, broken, backward)
    return skip._replace(cause=cause, lower_helps=helps)


def _looked(
    skip: Skip, loss_scale: tf.Tensor, floor: tf.Tensor, diagnose: Callable
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Whether an overflow is presumed; whether gradients are not finite at a scale of 1; and then at any scale."""
    seen = traced_once(lambda small: _seen(with_user_autograph(diagnose)(small)))
    presumed = tf.equal(skip.cause, int(Cause.OVERFLOW))

    def look() -> tuple[tf.Tensor, tf.Tensor]:
        # 1 is far above what float16 flushes to zero, and 2^-14 far below what overflows in it.
        scales = tf.minimum(1.0, loss_scale), tf.minimum(floor, _LOW_SCALE)
        at_one, at_low = (seen(tf.maximum(s / loss_scale, SMALLEST_SCALE)) for s in scales)
        broken = tf.logical_not(at_one.all_finite)
        flushed = tf.logical_not(tf.reduce_any(tf.logical_and(tf.logical_not(at_one.finite), at_low.not_zero)))
        return broken, tf.logical_and(broken, tf.logical_or(tf.logical_not(at_low.all_finite), flushed))

    no = tf.constant(False)
    return presumed, *tf.cond(presumed, lambda: call_noninlined(look), lambda: (no, no))


class _Seen(NamedTuple):
    """What is kept of the gradients for one scale, so that those for another need not be there at the same time.

    Attributes:
        all_finite: Scalar bool.
        finite: Bool, one for each value.
        not_zero: Bool, one for each value.
    """

    all_finite: tf.Tensor
    finite: tf.Tensor
    not_zero: tf.Tensor


def _seen(grads: list) -> _Seen:
    values = gradients.joined(grads)
    finite = tf.concat([tf.math.is_finite(value) for value in values], 0)
    not_zero = tf.concat([tf.not_equal(value, tf.zeros([], value.dtype)) for value in values], 0)
    return _Seen(gradients.all_finite(grads), finite, not_zero)


def _corrected(skip: Skip, loss_scale: tf.Tensor, presumed: tf.Tensor, broken: tf.Tensor, backward: tf.Tensor) -> Skip:
    helps = tf.logical_and(tf.logical_and(presumed, loss_scale > 1.0), tf.logical_not(broken))
    return skip._replace(cause=choose(backward, int64(Cause.BACKWARD), skip.cause), lower_helps=helps)
