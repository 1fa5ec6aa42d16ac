"""Finds gradients that are passed as unscaled but still carry the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaler.backend.graphs import is_eager
from scaler.mistakes.forgotten import may_be_scale
from scaler.mistakes.marks import LOSS_SCALE, READ, SCALED, UNSCALED, kind_of
from scaler.mistakes.sources import tensors_upstream
from scaler.mistakes.upstream import Upstream

_DIVISIONS = ("RealDiv", "Div", "Reciprocal", "Inv", "Pow")


def still_scaled(upstream: Upstream, variables: Sequence) -> str | None:
    """Returns a warning if a scale entered gradients, and nothing upstream may have taken it out again, else None.

    A false alarm is worse than a miss. So nothing may be there that could be another scale, such as an argument, a
    variable that is not the model's, or a constant. In eager mode nothing is visible.

    Args:
        upstream: What the gradients come from.
        variables: The trained variables of the model.
    """
    if tf.executing_eagerly() or not _carries_a_scale(upstream, variables):
        return None
    return (
        "apply(grads, unscaled=True): these gradients come from a scaled loss, and nothing divided them by the loss "
        "scale since: they seem to be too large by this factor. Leave unscaled=True out, or pass the result of "
        "unscale(grads)."
    )


def _carries_a_scale(upstream: Upstream, variables: Sequence) -> bool:
    if UNSCALED in upstream.marks:
        if not {SCALED, LOSS_SCALE} & set(upstream.marks):
            return False
        # Some of the list may have been forgotten.
        alone = [upstream.of([value]) for value in upstream.values]
        upstream = upstream.of([one.values[0] for one in alone if UNSCALED not in one.marks])
    seen = upstream.floating
    kinds = {kind_of(tensor) for tensor in seen} - {None}
    if not kinds or not kinds <= {SCALED, LOSS_SCALE} or any(map(_divides_by_a_scale, seen)):
        return False
    return not any(map(may_be_scale(upstream, variables), (one for one in seen if kind_of(one) is None)))


def _divides_by_a_scale(tensor: tf.Tensor) -> bool:
    if is_eager(tensor) or tensor.op.type not in _DIVISIONS:
        return False
    divisors = tensors_upstream(tensor.op.inputs[-1:], kind_of)
    return any(kind_of(source) in (SCALED, LOSS_SCALE, READ) for source in divisors)
