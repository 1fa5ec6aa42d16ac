"""Finds losses whose share of one replica certainly is not what a step on several replicas takes it for."""

from __future__ import annotations

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import is_eager

_PASS = ("Identity", "Cast", "EnsureShape", "Reshape", "AddV2", "AddN", "Sub", "Neg", "Pack")
_EACH = (
    *("Square", "SquaredDifference", "Pow", "Abs", "Log", "Log1p", "Relu", "Softplus", "Maximum"),
    *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
)
"""Operations that make a number of each example, and divide nothing."""


def undivided_mean(loss: tf.Tensor) -> str | None:
    """The warning if a loss is a mean over one replica's examples where the gradients of all are added; else None.

    Args:
        loss: As it is scaled.
    """
    if not _is_only(loss, "Mean"):
        return None
    return (
        f"scale_loss(loss): the gradients of {replicas.replica_count()} replicas are added, and nothing divides this "
        "mean by their number: the step is that many times as large as on one device. Divide it by "
        "tf.distribute.get_strategy().num_replicas_in_sync, or use a loss of keras.losses, which does."
    )


def divided_sum(loss: tf.Tensor) -> str | None:
    """The warning if a loss is a sum over one replica's examples where the step takes the mean of all; else None.

    Args:
        loss: As the loss function returned it.
    """
    if not _is_only(loss, "Sum"):
        return None
    return (
        f"the loss is a sum over examples. On {replicas.replica_count()} replicas a step takes it for the mean over "
        "those of one, and divides it by their number: it is that much smaller than on one device. Take the mean, or "
        "pass a Keras loss with reduction='sum'."
    )


def _is_only(loss: tf.Tensor, reduction: str) -> bool:
    """Whether a loss on several replicas is made of such reductions over examples alone, as far as a graph shows it.

    A product with any number, and a quotient, may be a division by the number of replicas: then it is not.
    """
    if replicas.replica_count() == 1 or is_eager(loss):
        return False
    waiting = [(loss, False)]
    while waiting:
        tensor, behind = waiting.pop()
        op = tensor.op
        if op.type in _PASS or (op.type == reduction and not behind):
            inputs = op.inputs if op.type in ("AddV2", "AddN", "Sub", "Pack") else op.inputs[:1]
            waiting += [(one, behind or (op.type == reduction and one.shape.rank != 0)) for one in inputs]
        elif not behind or op.type not in _EACH or op.inputs[0].op.type == "ReadVariableOp":
            return False
    return True
