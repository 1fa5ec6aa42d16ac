"""A loss is scaled once, and a gradient unscaled once: what goes through twice is refused where it can be seen."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler import gradients
from scaler.errors import InvalidArgument
from scaler.marks import SCALED, UNSCALED, mark, marks_upstream


def refuse_scaled(loss: tf.Tensor) -> None:
    """Raises `InvalidArgument` for a loss that some scaler has scaled."""
    if SCALED in marks_upstream([loss]):
        raise InvalidArgument(
            "scale(loss): the loss was scaled already, by this loss scaler or by another one, so that its gradients "
            "carry the product of both scales and are divided by one of them: expected a loss that nothing scaled. "
            "Call scale once, on the sum of what is to be differentiated."
        )


def refuse_unscaled(method: str, grads: Sequence[gradients.Gradient]) -> None:
    """Raises `InvalidArgument` for gradients that come from `unscale`.

    Those of a penalty on unscaled gradients do too, but through a backward pass of its own, which carries a scale.
    """
    if marks_upstream(gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)) == {UNSCALED}:
        raise InvalidArgument(
            f"{method}(grads): these gradients went through unscale already, and would be divided by the loss scale "
            "once more: expected gradients of the scaled loss. Those that are unscaled go to apply(..., unscaled=True)."
        )


def marked_unscaled(grads: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
    """The same gradients, which `refuse_unscaled` recognises."""
    return [gradients.limit(grad, lambda values, _: mark(values, UNSCALED)) for grad in grads]
