"""Why a step is skipped: which gradients are not finite, and whether a weight was not finite before."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import apart
from scaler.gate.targets import Targets
from scaler.outcome.outcome import Skip, presumed_cause


def reason_of(
    targets: Targets, grads: Sequence, squares: tf.Tensor | None, loss_scale: tf.Tensor, loss_finite: tf.Tensor
) -> Skip:
    """The reason that gradients give for a skip.

    Args:
        targets: What the step was to move.
        grads: Scaled gradients without duplicate indices, of any floating dtype.
        squares: The squared norm of each, unscaled: float32 or float64 [n]. None if it has yet to be measured.
        loss_scale: Scalar float32, what they are scaled by.
        loss_finite: Scalar bool.
    """
    weights = targets.model_weights()

    def look(scaled: list, *known: tf.Tensor) -> Skip:
        squares = known[0] if known else targets.squared_norms(scaled, loss_scale, may_branch=False)
        broken = gradients.not_finite(list(map(gradients.values_of, scaled)))
        # Where every value is finite, a squared norm need not be.
        bad = tf.where(tf.reduce_any(broken), broken, tf.logical_not(tf.math.is_finite(squares)))
        some, positions = tf.reduce_any(bad), tf.constant(targets.positions, tf.int64)
        first = tf.where(some, _first(bad), tf.argmax(squares))
        last = tf.shape(bad, tf.int64)[0] - 1 - _first(tf.reverse(bad, [0]))
        spoiled = gradients.not_finite(weights)
        return Skip(
            cause=presumed_cause(loss_finite, tf.logical_not(tf.reduce_any(broken))),
            has_nan=tf.reduce_any(tf.math.is_nan(squares)),
            index=tf.gather(positions, first),
            count=tf.math.count_nonzero(bad),
            nearest=tf.where(some, tf.gather(positions, last), -1),
            weight=tf.where(tf.reduce_any(spoiled), _first(spoiled), -1),
            lower_helps=tf.constant(False),
        )

    return Skip(*apart(look, list(grads), *([] if squares is None else [squares])))


def _first(flags: tf.Tensor) -> tf.Tensor:
    # Of bools there is no such kernel on CPUs of older releases, and of integers none on GPUs.
    return tf.argmax(tf.cast(flags, tf.float32))
