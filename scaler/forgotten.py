"""Whether gradients certainly come from a loss that nobody scaled: by all that they are computed from in a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients, replicas
from scaler.marks import kind_of, upstream

_READS = ("ReadVariableOp", "ResourceGather")
_HARMLESS_SCALARS = ("Const", "Cast")


def nobody_scaled(grads: Sequence[gradients.Gradient], variables: Sequence) -> bool:
    """Whether these are gradients of a model in this graph, with nothing upstream that may be a scale.

    It is certain where everything upstream is seen, and there is no mark, no constant that looks like a scale, no other
    scalar that is not made of counts, and no argument or variable that may hold a gradient. In eager mode nothing is
    seen.

    Args:
        grads: Gradients.
        variables: Those of the model, which hold no gradients.
    """
    if tf.executing_eagerly():
        return False
    values = [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]
    shapes = [value.shape.as_list() for value in values if value.shape.rank is not None]
    seen = list(upstream(values))
    handles = [getattr(replicas.native(replicas.own_component(own)), "handle", None) for own in variables]
    of_a_model = any(not _is_eager(tensor) and tensor.op.type in _READS for tensor in seen)
    return of_a_model and not any(_may_be_scaled(tensor, shapes, handles) for tensor in seen)


def _may_be_scaled(tensor: tf.Tensor, shapes: list, handles: list) -> bool:
    if kind_of(tensor):
        return True
    if _is_eager(tensor):
        return tensor.shape.rank == 0
    op = tensor.op
    if any(source.dtype.is_floating for source in op.inputs):
        return False
    if op.type in _READS:
        return not any(_outside(op.inputs[0]) is handle for handle in handles) and _may_be_given(tensor, shapes)
    # Values may pass unseen in a list of tensors, as in a loop, or as bits.
    if op.type == "Bitcast" or any(source.dtype == tf.variant for source in op.inputs):
        return True
    if op.type == "Const":
        return tensor.shape.rank == 0 and _looks_like_a_scale(tf.get_static_value(tensor))
    if tensor.shape.rank in (0, None):
        return op.type not in _HARMLESS_SCALARS
    return op.type == "Placeholder" and _may_be_given(tensor, shapes)


def _may_be_given(tensor: tf.Tensor, shapes: list) -> bool:
    """Whether a value that is kept or handed in may be a scale, or a gradient that somebody has scaled."""
    return tensor.shape.rank in (0, None) or tensor.shape.as_list() in shapes


def _outside(captured: tf.Tensor) -> tf.Tensor:
    """The tensor that a function captured, as it was called where it was made."""
    while not _is_eager(captured) and captured.op.type == "Placeholder":
        outer = next((own for own, inner in getattr(captured.graph, "captures", ()) if inner is captured), None)
        if outer is None:
            break
        captured = outer
    return captured


def _looks_like_a_scale(value: Any) -> bool:
    """Whether a constant is a power of two such as scales are, or their inverses, and batches hardly."""
    if value is None:
        return True
    fraction, exponent = math.frexp(abs(float(value)))
    return fraction == 0.5 and abs(exponent - 1) >= 10


def _is_eager(tensor: tf.Tensor) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)
