"""Checks that a loss is scaled once and its gradients unscaled once, by the same scale. Marks upstream tell."""

from __future__ import annotations

import tensorflow as tf

from scaler.backend.graphs import is_eager
from scaler.errors import InvalidArgument
from scaler.misuse.marks import LOSS_SCALE, READ, SCALED, kind_of
from scaler.misuse.sources import tensors_upstream
from scaler.misuse.upstream import Upstream

_SUMS = ("AddV2", "AddN", "Sub", "Neg", "Sum", "Mean")
_SHAPES = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Pack")
_LINEAR = ("Mul", *_SUMS, *_SHAPES)


def refuse_scaled(loss: tf.Tensor) -> None:
    """Raises `InvalidArgument` for a loss that a scaler scaled, or that was multiplied by a scale by hand.

    A scale counts as multiplied by hand only if it enters the loss through sums and products. A penalty on gradients
    that were divided by a scale also depends on one.
    """
    by_hand = {kind_of(tensor) for tensor in tensors_upstream([loss], _ends_a_product)} & {LOSS_SCALE, READ}
    if by_hand or SCALED in Upstream([loss]).marks_before_stops([loss]):
        raise InvalidArgument(
            "scale(loss): the loss was scaled already, by this loss scaler or by another one: expected an unscaled "
            "loss. Its gradients would carry the product of both scales but be divided by only one. Call scale once, "
            "on the sum of all losses to differentiate."
        )


def _ends_a_product(tensor: tf.Tensor) -> bool:
    operation = getattr(tensor, "op", None) if not tf.executing_eagerly() else None
    return kind_of(tensor) is not None or getattr(operation, "type", "") not in _LINEAR


def divides_by_a_scale(tensor: tf.Tensor) -> bool:
    """Whether a tensor in a graph is the result of a division by a scale."""
    if is_eager(tensor) or tensor.op.type != "RealDiv":
        return False
    divisor = tensor.op.inputs[1]
    return any(kind_of(source) in (LOSS_SCALE, READ) for source in tensors_upstream([divisor], _ends_a_product))
