"""Finds gradients that are passed as unscaled but still carry the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager
from scaler.mistakes.forgotten import look_upstream
from scaler.mistakes.marks import LOSS_SCALE, READ, SCALED, UNSCALED, kind_of, upstream
from scaler.mistakes.scaled_twice import marks_of

_DIVISIONS = ("RealDiv", "Div", "Reciprocal", "Inv", "Pow")


def still_scaled(grads: Sequence[gradients.Gradient], variables: Sequence) -> bool:
    """Whether a scale entered these gradients, and nothing upstream of them may have taken it out again.

    A false alarm is worse than a miss. So nothing may be there that could be another scale, such as an argument, a
    variable that is not the model's, or a constant. In eager mode nothing is visible.

    Args:
        grads: Gradients.
        variables: The trained variables of the model.
    """
    if tf.executing_eagerly():
        return False
    found = marks_of(grads)
    if UNSCALED in found:
        if not {SCALED, LOSS_SCALE} & set(found):
            return False
        # Some of the list may have been forgotten.
        grads = [grad for grad in grads if tf.is_tensor(grad) and UNSCALED not in marks_of([grad])]
    seen, may_scale = look_upstream(grads, variables)
    kinds = {kind_of(tensor) for tensor in seen} - {None}
    if not kinds or not kinds <= {SCALED, LOSS_SCALE} or any(map(_divides_by_a_scale, seen)):
        return False
    return not any(may_scale(tensor) for tensor in seen if kind_of(tensor) is None)


def _divides_by_a_scale(tensor: tf.Tensor) -> bool:
    if is_eager(tensor) or tensor.op.type not in _DIVISIONS:
        return False
    return any(kind_of(source) in (SCALED, LOSS_SCALE, READ) for source in upstream(tensor.op.inputs[-1:]))
