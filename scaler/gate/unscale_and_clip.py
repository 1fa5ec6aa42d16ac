"""Scaled gradients become what an optimizer is given: unscaled, then clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.gradients.clipping import Limiter


def finish(
    grad: tf.Tensor | tf.IndexedSlices, unscale: Callable[[list], list], limit: Limiter | None, position: int
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


def finish_all(grads: Sequence, variables: Sequence, loss_scale: tf.Tensor, limit: Limiter | None) -> list:
    """All gradients, divided by the loss scale and clipped. The new value of a variable is neither.

    Args:
        grads: Scaled gradients of any floating dtype.
        variables: One for each gradient.
        loss_scale: Scalar float32.
        limit: Clips unscaled gradients, or None.
    """

    def finished(grad: tf.Tensor | tf.IndexedSlices, position: int) -> gradients.Gradient:
        one = finish(grad, lambda grads: gradients.divide(grads, loss_scale), limit, position)
        return gradients.opaque([one])[0]

    pairs = enumerate(zip(grads, variables, strict=True))
    return [grad if gradients.overwrites(v) else finished(grad, position) for position, (grad, v) in pairs]
