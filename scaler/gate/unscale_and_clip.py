"""Scaled gradients become what an optimizer is given: unscaled, then clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.gradients.clipping import Limiter


def finish(
    grad: tf.Tensor | tf.IndexedSlices, unscale: Callable[[list], list], limit: Limiter | None, position: int | None
) -> gradients.Gradient:
    """One gradient, unscaled and clipped.

    Args:
        grad: A scaled gradient of any floating dtype.
        unscale: A function from a list of scaled gradients to unscaled ones in float32.
        limit: Clips unscaled gradients, or None.
        position: Where the gradient stands among all gradients of the step.
    """
    (unscaled,) = unscale([grad])
    return unscaled if limit is None else gradients.limit(unscaled, limit, position)


def finish_one(
    grad: tf.Tensor | tf.IndexedSlices, loss_scale: tf.Tensor, limit: Limiter | None, position: int | None
) -> gradients.Gradient:
    """One gradient, divided by the loss scale and clipped, in a graph that TensorFlow may rewrite.

    Args:
        grad: A scaled gradient of any floating dtype.
        loss_scale: Scalar float32.
        limit: Clips unscaled gradients, or None.
        position: Where the gradient stands among all gradients of the step; None if the limit is the same for all.
    """
    finished = finish(grad, lambda grads: gradients.divide(grads, loss_scale), limit, position)
    untouched = limit is None and gradients.is_one(loss_scale)
    return finished if untouched else gradients.opaque([finished])[0]


def finish_all(grads: Sequence, variables: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> list:
    """All gradients, divided by the loss scale and clipped. The new value of a variable is neither.

    Args:
        grads: Scaled gradients of any floating dtype.
        variables: One for each gradient.
        loss_scale: Scalar float32.
        limit: Clips unscaled gradients, or None.
    """
    pairs = enumerate(zip(grads, variables, strict=True))
    return [
        grad if gradients.overwrites(variable) else finish_one(grad, loss_scale, limit, position)
        for position, (grad, variable) in pairs
    ]
