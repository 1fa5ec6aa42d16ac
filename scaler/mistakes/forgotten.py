"""Finds gradients of a loss that certainly nobody scaled, by everything they are computed from in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import calls_functions, captured_from, functions_called, is_eager
from scaler.mistakes.marks import kind_of
from scaler.mistakes.upstream import Upstream

_READS = ("ReadVariableOp", "ResourceGather")
_HARMLESS_SCALARS = ("Const", "Cast")
_DRAWS = ("Random", "TruncatedNormal", "StatelessRandom", "StatelessTruncatedNormal")


def not_scaled(upstream: Upstream, variables: Sequence, asked: bool) -> str | None:
    """Returns a warning if a step would unscale gradients although nobody can have scaled their loss, else None.

    Args:
        upstream: What the gradients come from.
        variables: The model's trained variables.
        asked: Whether anyone used the loss scaler before.
    """
    why = None
    if not asked:
        why = "neither scale(loss) (scale_loss of a LossScaleOptimizer) nor loss_scale was ever used"
    elif nobody_scaled(upstream, variables):
        why = "nothing that they are computed from comes from scale(loss) or was multiplied by loss_scale"
    if why is None:
        return None
    return (
        f"apply(grads): the gradients are divided by the loss scale, but {why}: they seem to be gradients of an "
        "unscaled loss, and the step would be too small by this factor. Differentiate scale(loss). If you scale by "
        "hand, read the factor from loss_scale. For no scaling use scaler.NoScaling()."
    )


def nobody_scaled(upstream: Upstream, variables: Sequence) -> bool:
    """Whether these are gradients of a model in this graph, with nothing upstream that may be a scale.

    A false alarm is worse than a miss. So the answer is True only if everything upstream is visible and none of it may
    carry a scale. What may carry one: a mark, a variable outside the model, a scalar that is neither a count nor drawn,
    an argument that may hold gradients, a constant that may be a scale. In eager mode nothing is visible.

    Args:
        upstream: What the gradients come from.
        variables: The model's trained variables, which hold no gradients.
    """
    if tf.executing_eagerly() or upstream.marks:
        return False
    seen = upstream.floating
    of_a_model = any(not is_eager(tensor) and tensor.op.type in _READS for tensor in seen)
    return of_a_model and not any(map(may_be_scale(upstream, variables), seen))


def may_be_scale(upstream: Upstream, variables: Sequence) -> Callable[[tf.Tensor], bool]:
    """Returns a function that says whether a tensor upstream in a graph may be a loss scale, or hide one."""
    shapes = [value.shape.as_list() for value in upstream.values if value.shape.rank is not None]
    handles = [getattr(replicas.native(replicas.own_component(own)), "handle", None) for own in variables]
    return lambda tensor: _may_be_scaled(tensor, shapes, handles)


def _may_be_scaled(tensor: tf.Tensor, shapes: list, handles: list) -> bool:
    if kind_of(tensor):
        return True
    if is_eager(tensor):
        return tensor.shape.rank in (0, 1)
    op = tensor.op
    if calls_functions(op) and not functions_called(op):
        return True
    if op.type == "Placeholder" and captured_from(tensor) is not None:
        return False  # What it stands for is among the tensors, too.
    if op.type == "Fill":
        return _looks_like_a_scale(op.inputs[1])
    if any(source.dtype.is_floating for source in op.inputs):
        return False
    if op.type in _READS:
        return not any(_outside(op.inputs[0]) is handle for handle in handles)
    if op.type.startswith(_DRAWS):
        return False
    # Values may pass unseen: in a list of tensors, as in a loop, as bits, or rounded to integers.
    if op.type == "Bitcast" or any(source.dtype == tf.variant or source.op.type == "Cast" for source in op.inputs):
        return True
    if op.type == "Const":
        # A constant that only divides is the size of a batch.
        multiplies = any(user.type != "RealDiv" for user in tensor.consumers())
        return tensor.shape.rank == 0 and multiplies and _looks_like_a_scale(tensor)
    if tensor.shape.rank in (0, None):
        return op.type not in _HARMLESS_SCALARS
    return op.type == "Placeholder" and _may_be_gradients(tensor, shapes)


def _may_be_gradients(argument: tf.Tensor, shapes: list) -> bool:
    """Whether an argument has the shape of a gradient, or is flat and may hold all gradients in one tensor."""
    shape = argument.shape
    return (shape.rank == 1 and shape.is_fully_defined()) or shape.as_list() in shapes


def _outside(captured: tf.Tensor) -> tf.Tensor:
    """The original of a captured tensor, in the outermost graph that it comes from."""
    while not is_eager(captured) and captured.op.type == "Placeholder":
        outer = captured_from(captured)
        if outer is None:
            break
        captured = outer
    return captured


def _looks_like_a_scale(tensor: tf.Tensor) -> bool:
    """Whether a scalar may be a scale: unknown, at least 100, or a power of two of at least 8 or its inverse."""
    value = tf.get_static_value(tensor)
    if value is None:
        return True
    fraction, exponent = math.frexp(float(value))
    return float(value) >= 100.0 or (fraction == 0.5 and abs(exponent - 1) >= 3)
