"""Whether gradients certainly come from a loss that nobody scaled: by all that they are computed from in a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.marks import kind_of, upstream

_READS = ("ReadVariableOp", "ResourceGather")
_HARMLESS_SCALARS = ("Const", "Cast")


def nobody_scaled(grads: Sequence[gradients.Gradient]) -> bool:
    """Whether these are gradients of a model in this graph, with nothing upstream that may be a scale.

    It is certain where everything upstream is seen, and there is no mark, no constant that looks like a scale, no other
    scalar that is not made of counts, and no argument that may be a gradient. In eager mode nothing is seen.

    Args:
        grads: Gradients, one for each variable.
    """
    if tf.executing_eagerly():
        return False
    values = [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]
    shapes = [value.shape.as_list() for value in values if value.shape.rank is not None]
    seen = list(upstream(values))
    of_a_model = any(not _is_eager(tensor) and tensor.op.type in _READS for tensor in seen)
    return of_a_model and not any(_may_be_scaled(tensor, shapes) for tensor in seen)


def _may_be_scaled(tensor: tf.Tensor, shapes: list) -> bool:
    if kind_of(tensor):
        return True
    if _is_eager(tensor):
        return tensor.shape.rank == 0
    op = tensor.op
    if any(source.dtype.is_floating for source in op.inputs):
        return False
    if op.type in _READS:
        return tensor.shape.rank == 0
    # Values may pass unseen in a list of tensors, as in a loop, or as bits.
    if op.type == "Bitcast" or any(source.dtype == tf.variant for source in op.inputs):
        return True
    if op.type == "Const":
        return tensor.shape.rank == 0 and _looks_like_a_scale(tf.get_static_value(tensor))
    if tensor.shape.rank in (0, None):
        return op.type not in _HARMLESS_SCALARS
    return op.type == "Placeholder" and tensor.shape.as_list() in shapes


def _looks_like_a_scale(value: Any) -> bool:
    """Whether a constant is a power of two such as scales are, or their inverses, and batches hardly."""
    if value is None:
        return True
    fraction, exponent = math.frexp(abs(float(value)))
    return fraction == 0.5 and abs(exponent - 1) >= 10


def _is_eager(tensor: tf.Tensor) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)
