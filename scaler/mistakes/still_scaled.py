"""Finds gradients that are passed as unscaled but still carry the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler import gradients
from scaler.mistakes.marks import LOSS_SCALE, READ, SCALED, kind_of, upstream

_DIVISIONS = ("RealDiv", "Div", "Reciprocal", "Inv", "Pow")


def still_scaled(grads: Sequence[gradients.Gradient]) -> bool:
    """Whether a scale entered these gradients and nothing upstream of them was divided by one.

    A false alarm is worse than a miss. In eager mode nothing is visible.
    """
    if tf.executing_eagerly():
        return False
    values = [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]
    seen = list(upstream(values))
    kinds = {kind_of(tensor) for tensor in seen} - {None}
    return bool(kinds) and kinds <= {SCALED, LOSS_SCALE} and not any(map(_divides_by_a_scale, seen))


def _divides_by_a_scale(tensor: tf.Tensor) -> bool:
    operation = getattr(tensor, "op", None) if not hasattr(tensor, "numpy") else None
    if operation is None or operation.type not in _DIVISIONS:
        return False
    return any(kind_of(source) in (LOSS_SCALE, READ) for source in upstream(operation.inputs[-1:]))
