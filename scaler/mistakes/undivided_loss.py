"""Finds a loss under `fit` that is a mean over one replica's examples, and that nothing divides by their number."""

from __future__ import annotations

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import is_eager

_PASS = ("Identity", "Cast", "EnsureShape", "Reshape", "AddV2", "AddN", "Sub", "Neg")


def undivided_loss(loss: tf.Tensor) -> str | None:
    """The warning, if on several replicas a loss is a sum of means and of nothing else; otherwise None.

    A product with any number, and a quotient, may be the division, so that nothing is said.

    Args:
        loss: As it is scaled.
    """
    count = replicas.replica_count()
    if count == 1 or is_eager(loss):
        return None
    waiting, seen = [loss], set()
    while waiting:
        op = waiting.pop().op
        if op in seen or op.type == "Mean":
            continue
        if op.type not in _PASS:
            return None
        seen.add(op)
        waiting += op.inputs[:1] if op.type == "Reshape" else op.inputs
    return (
        f"scale_loss(loss): the gradients of {count} replicas are added up, and nothing divides this mean "
        f"by their number: the step is {count} times as large as on one device. Divide it by "
        "tf.distribute.get_strategy().num_replicas_in_sync, or use a loss of keras.losses, which does."
    )
