"""Why a step is skipped: by the norms of its gradients, and in a branch by a look at their values."""

from __future__ import annotations

import tensorflow as tf

from scaler.gate.targets import Targets
from scaler.outcome.outcome import Skip, not_skipped, presumed_cause


def reason_of(targets: Targets, squares: tf.Tensor, loss_finite: tf.Tensor, broken: tf.Tensor | None = None) -> Skip:
    """The reason that gradients give for a skip.

    Without `broken` a gradient whose squared norm is infinite counts as non-finite, though its values may only be
    larger than 2^64.

    Args:
        targets: What the step was to move.
        squares: The squared norm of each gradient, unscaled: float32 or float64 [n].
        loss_finite: Scalar bool.
        broken: Bool [n], which of the scaled gradients hold a value that is not finite; None in a step that selects.
    """
    large = tf.logical_not(tf.math.is_finite(squares))
    # Where every value is finite, a squared norm need not be.
    bad = tf.cast(large if broken is None else tf.where(tf.reduce_any(broken), broken, large), squares.dtype)
    count, positions = tf.math.count_nonzero(bad), tf.constant(targets.positions, tf.int64)
    some = count > 0
    overflowed = some if broken is None else tf.reduce_any(broken)
    first = tf.gather(positions, tf.argmax(tf.where(some, bad, squares)))
    last = tf.gather(positions, len(targets.positions) - 1 - tf.argmax(tf.reverse(bad, [0])))
    return not_skipped()._replace(
        cause=presumed_cause(loss_finite, tf.logical_not(overflowed)),
        has_nan=tf.reduce_any(tf.math.is_nan(squares)),
        index=first,
        count=count,
        nearest=tf.where(some, last, -1),
    )


def where(skipped: tf.Tensor, reason: Skip) -> Skip:
    """The reason where `skipped`, scalar bool, is true, and that of an applied step elsewhere."""
    return Skip(*(tf.where(skipped, one, none) for one, none in zip(reason, not_skipped(), strict=True)))
