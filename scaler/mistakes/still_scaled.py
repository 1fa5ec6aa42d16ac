"""Whether gradients that are said to be unscaled carry the loss scale still."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler import gradients
from scaler.mistakes.marks import LOSS_SCALE, READ, SCALED, kind_of, upstream

_DIVISIONS = ("RealDiv", "Div", "Reciprocal", "Inv", "Pow")


def still_scaled(grads: Sequence[gradients.Gradient]) -> bool:
    """Whether a scale went into these gradients, and nothing that they come from was divided by one since.

    A wrong yes is worse than a wrong no. In eager mode nothing is seen.
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
