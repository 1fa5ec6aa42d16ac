"""How large gradients are: their norms, and what a strategy may want to know of a step. Pure functions.

An entry of a list of gradients is a tensor, a `tf.IndexedSlices` or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from scaler.backend import bits
from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import call_noninlined, in_xla
from scaler.checks import within
from scaler.gradients.lists import Gradient, divide, is_one, squared_norm_of_each, values_of
from scaler.strategies.base import check_edges

_INFINITY = 0x7F800000


@no_autograph
def amax(grads: Sequence[Gradient]) -> tf.Tensor:
    """The largest magnitude, scalar float32: infinity if any value is not finite, 0 if there is none.

    A float64 value beyond float32 counts as its largest finite number.

    Args:
        grads: Gradients of any floating dtype and shape; `tf.IndexedSlices` without duplicate indices, as
            `LossScaler.unscale` returns them.
    """
    # Bit patterns are ordered as magnitudes are, with every NaN above infinity; a maximum of floats may lose a NaN.
    return bits.as_float(tf.minimum(bits.largest(list(map(_magnitudes, _present(grads)))), _INFINITY))


@no_autograph
def histogram(grads: Sequence[Gradient], edges: Sequence[float]) -> tf.Tensor:
    """How many values lie in each interval of magnitude, int64 [edges + 1].

    The intervals are [0, e1], (e1, e2], ..., (en, infinity], and what is not finite counts in the last.

    Args:
        grads: *Scaled* gradients in the compute dtype, of any shape. Duplicate indices of a `tf.IndexedSlices` count
            one by one.
        edges: Positive finite numbers in ascending order, at least one; they are rounded to float32.

    Raises:
        InvalidArgument: For other edges.
    """
    check_edges(edges)
    bounds = [bits.constant(int(pattern)) for pattern in np.asarray(edges, np.float32).view(np.uint32)]
    zero = tf.zeros([len(edges)], tf.int64)
    above = [zero]
    magnitudes = list(map(_magnitudes, _present(grads)))
    for one in magnitudes:
        counts = [tf.math.count_nonzero(one > bound) for bound in bounds]
        above.append(tf.stack(counts) if counts else zero)
    total = tf.add_n([tf.zeros([1], tf.int64), *(tf.size(one, tf.int64)[None] for one in magnitudes)])
    reached = tf.concat([total, tf.add_n(above), [0]], axis=0)
    return reached[:-1] - reached[1:]


def _present(grads: Sequence[Gradient]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(values_of(grad)) for grad in grads if grad is not None]


def _magnitudes(values: tf.Tensor) -> tf.Tensor:
    narrow = tf.cast(values, tf.float32)
    if values.dtype == tf.float64:
        # What is finite stays so.
        narrow = tf.where(tf.math.is_finite(values), tf.saturate_cast(values, tf.float32), narrow)
    return bits.magnitude_bits(narrow)


_SURELY_EXACT = (2.0**-60, 2.0**100)
"""Between these, a float32 sum of squares has lost nothing that matters to underflow, and nothing to overflow."""


def squared_norms(grads: Sequence[Gradient], loss_scale: tf.Tensor, may_branch: bool = True) -> tf.Tensor:
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
        return _sums_of_squares(divide(grads, loss_scale))
    scaled = _sums_of_squares(grads)
    if is_one(loss_scale):
        return scaled
    unscaled = scaled / loss_scale / loss_scale
    sums = tf.reduce_sum([scaled, unscaled], axis=1)
    sure = tf.reduce_all(sums == within(sums, *_SURELY_EXACT))
    return tf.cond(sure, lambda: unscaled, lambda: call_noninlined(_exactly, list(grads), loss_scale))


def _sums_of_squares(grads: Sequence[Gradient]) -> tf.Tensor:
    # l2_loss is half of it.
    return 2.0 * tf.stack([tf.nn.l2_loss(tf.cast(values_of(grad), tf.float32)) for grad in grads])


def _exactly(grads: Sequence[Gradient], loss_scale: tf.Tensor) -> tf.Tensor:
    return tf.stack(squared_norm_of_each(divide(grads, loss_scale)))
