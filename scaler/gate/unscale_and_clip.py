"""Scaled gradients become what an optimizer is given: unscaled, then clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import in_xla
from scaler.gate.joined import Joined
from scaler.gate.targets import Targets
from scaler.gradients.clipping import Limiter

_SMALL = 2**16
"""Elements of all gradients of a step together. Unscaled copies of as many stay in a core's cache."""


def worth_unscaling_first(targets: Targets, together: Joined, loss_scale: tf.Tensor) -> bool:
    """Whether gradients are so small that they are unscaled before they are measured, and not as each is applied.

    The norm of scaled gradients needs no unscaled copies, which take memory, but a dozen operations to be sure that it
    is exact. Beside small gradients these take longer than the division. Gradients that are joined are divided later,
    by one operation for many.

    Args:
        targets: What the step moves.
        together: Its scaled gradients.
        loss_scale: Scalar float32, what they are scaled by.
    """
    if in_xla() or gradients.is_one(loss_scale) or not all(targets.takes_derivative):
        return False  # XLA fuses the division into what follows.
    size = together.size
    return size is not None and size <= _SMALL and not together.worth_measuring_together()


def unscaled(grads: Sequence, loss_scale: tf.Tensor) -> list[gradients.Gradient]:
    """All gradients, divided by the loss scale, in a graph that TensorFlow may rewrite."""
    return gradients.opaque(gradients.divide(grads, loss_scale))


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
