"""What a second backward pass tells of a skipped step: would a lower scale have helped?"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import as_called
from scaler.backend.graphs import apart, traced_once
from scaler.checks import SMALLEST_SCALE
from scaler.outcome import Cause, Skip

_LOW_SCALE = 2.0**-14
"""Where float16's backward pass can hardly overflow any more."""


def told_apart(
    skip: Skip,
    loss_scale: tf.Tensor,
    floor: tf.Tensor,
    diagnose: Callable,
    correct: Callable[[tf.Tensor, tf.Tensor], None],
) -> Skip:
    """The reason of a skip, after a look at the gradients at lower scales where an overflow is presumed.

    Args:
        skip: The reason as the gate presumes it.
        loss_scale: Scalar float32, of the step.
        floor: Scalar float32, the strategy's.
        diagnose: From an output gradient to the gradients for it.
        correct: Called once for all replicas with whether the cause is BACKWARD, and whether a lower scale helps.
    """
    differentiate = traced_once(as_called(diagnose))
    presumed = tf.equal(skip.cause, int(Cause.OVERFLOW))

    def looked() -> tuple[tf.Tensor, tf.Tensor]:
        # 1 is far above what float16 flushes to zero, and 2^-14 far below what overflows in it.
        scales = tf.minimum(1.0, loss_scale), tf.minimum(floor, _LOW_SCALE)
        at_one, at_low = (differentiate(tf.maximum(s / loss_scale, SMALLEST_SCALE)) for s in scales)
        broken = tf.logical_not(gradients.all_finite(at_one))
        cured = tf.logical_and(gradients.all_finite(at_low), gradients.any_cured(at_one, at_low))
        return broken, tf.logical_and(broken, tf.logical_not(cured))

    def agree(strategy: tf.distribute.Strategy, broken: tf.Tensor, backward: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        broken, backward = replicas.any_of(strategy, broken), replicas.any_of(strategy, backward)
        cause = tf.where(backward, int(Cause.BACKWARD), skip.cause)
        helps = tf.logical_and(tf.logical_and(presumed, loss_scale > 1.0), tf.logical_not(broken))
        correct(backward, helps)
        return cause, helps

    no = tf.constant(False)
    cause, helps = replicas.merge(agree, *tf.cond(presumed, lambda: apart(looked), lambda: (no, no)))
    return skip._replace(cause=cause, lower_helps=helps)
