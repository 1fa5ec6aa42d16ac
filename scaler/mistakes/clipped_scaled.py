"""Finds scaled gradients that were clipped to a limit that does not move with the loss scale. A graph shows it."""

from __future__ import annotations

import tensorflow as tf

from scaler.backend.graphs import is_eager
from scaler.mistakes.carried import TO_APPLY
from scaler.mistakes.marks import LOSS_SCALE, UNSCALED
from scaler.mistakes.upstream import Upstream


def clipped_while_scaled(upstream: Upstream) -> str | None:
    """Returns a warning if the last thing done to scaled gradients was to clip them to a constant, else None.

    It knows `tf.clip_by_global_norm`, `tf.clip_by_norm` and `tf.clip_by_value` by the names of their operations.

    Args:
        upstream: What the gradients come from.
    """
    if LOSS_SCALE not in upstream.marks or UNSCALED in upstream.marks:
        return None
    function = next(filter(None, map(_clipped_to_a_constant, upstream.values)), None)
    if function is None:
        return None
    return (
        f"apply(grads): {function} limited these gradients while they carried the loss scale, so that the limit in "
        "effect is smaller by this factor and moves with it. Pass apply(..., clip_norm=...) instead, or clip what "
        f"unscale(grads) returns and pass them to {TO_APPLY}."
    )


def _clipped_to_a_constant(value: tf.Tensor) -> str | None:
    """The function of TensorFlow that made a tensor, if it clips, and to a constant."""
    function = None if is_eager(value) else next((one for one in _LIMITS if one in value.op.name), None)
    limit: tf.Tensor | None = value if function else None
    for kind, place in _LIMITS[function] if function else ():
        if limit is None or limit.op.type != kind:
            return None
        limit = limit.op.inputs[place]
    return None if limit is None or tf.get_static_value(limit) is None else f"tf.{function}"


_LIMITS = {
    "clip_by_global_norm": (("Identity", 0), ("Mul", 1), ("AddV2", 0), ("Mul", 0)),
    "clip_by_norm": (("Identity", 0), ("RealDiv", 0), ("Mul", 1)),
    "clip_by_value": (("Maximum", 1),),
}
"""The operations from the result of each function back to its limit, each with the input to go on with."""
