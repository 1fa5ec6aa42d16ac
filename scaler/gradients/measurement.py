"""How large gradients are, at the cost of one pass over them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler.backend.graphs import call_noninlined, in_xla
from scaler.checks import within
from scaler.gradients import lists

_SURELY_EXACT = (2.0**-60, 2.0**100)
"""Between these, a float32 sum of squares has lost nothing that matters to underflow, and nothing to overflow."""


def squared_norms(grads: Sequence[lists.Gradient], loss_scale: tf.Tensor, may_branch: bool = True) -> tf.Tensor:
    """The squared norm of each unscaled gradient.

    The norm of the *scaled* gradients needs no unscaled copy of them. It is divided by the scale twice, which is exact
    for a power of two. Outside the range where this is safe, mostly on a skip, the gradients are unscaled and measured
    again.

    Args:
        grads: Scaled gradients of any floating dtype; `tf.IndexedSlices` without duplicate indices.
        loss_scale: Scalar float32.
        may_branch: Whether a second measurement may stand in a branch. If not, all gradients are unscaled first.

    Returns:
        Float32 of shape [len(grads)], or float64 if any gradient is. An entry is not finite if a value of its gradient
        is not, or if their sum of squares overflows.
    """
    if in_xla() or any(grad is not None and grad.dtype == tf.float64 for grad in grads):
        # XLA fuses the unscaling into the sum, while a condition would be expensive.
        return _exactly(grads, loss_scale)
    if not may_branch:
        return _sums_of_squares(lists.divide(grads, loss_scale))
    scaled = _sums_of_squares(grads)
    if lists.is_one(loss_scale):
        return scaled
    unscaled = scaled / loss_scale / loss_scale
    sums = tf.reduce_sum([scaled, unscaled], axis=1)
    sure = tf.reduce_all(sums == within(sums, *_SURELY_EXACT))
    return tf.cond(sure, lambda: unscaled, lambda: call_noninlined(_exactly, list(grads), loss_scale))


def _sums_of_squares(grads: Sequence[lists.Gradient]) -> tf.Tensor:
    # l2_loss is half of it.
    return 2.0 * tf.stack([tf.nn.l2_loss(tf.cast(lists.values_of(grad), tf.float32)) for grad in grads])


def _exactly(grads: Sequence[lists.Gradient], loss_scale: tf.Tensor) -> tf.Tensor:
    return tf.stack(lists.squared_norm_of_each(lists.divide(grads, loss_scale)))
