"""Takes back that `unscale` divides new values of variables, and refuses those of which it is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager
from scaler.errors import InvalidArgument
from scaler.misuse.marks import LOSS_SCALE, READ, UNSCALED, given_to_unscale, kind_of
from scaler.misuse.order_of_calls import Use
from scaler.misuse.trace import kinds_behind

_KEPT = ("Placeholder", "ReadVariableOp")
_PASS_ON = ("Identity", "Cast")
_DIVISIONS = ("RealDiv", "Div")
_BY_CONSTANTS = (*_DIVISIONS, "Mul")


def undivided(
    grads: Sequence[gradients.Gradient], variables: Sequence, unscaled: bool | tf.Tensor, use: Use
) -> list[gradients.Gradient]:
    """Gradients that may be unscaled already, with new values as they were before `unscale` divided them.

    `unscale` does not know the variables, so that it divides everything; what it made of a gradient remembers what it
    was. A new value that was changed since, or came from elsewhere, may be a divided one.

    Args:
        grads: A gradient or None for each variable.
        variables: What they are applied to.
        unscaled: Scalar bool, whether they are unscaled.
        use: Knows whether anything ever was.

    Raises:
        InvalidArgument: If a new value may have been divided by the scale.
    """
    if unscaled is False or (is_eager(unscaled) and not bool(unscaled)):
        return list(grads)
    return [
        _undivided(grad, variable, use) if gradients.overwrites(variable) and grad is not None else grad
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _undivided(grad: gradients.Gradient, variable: object, use: Use) -> gradients.Gradient:
    values = gradients.values_of(grad)
    given = given_to_unscale(values)
    if given is not None:
        return given
    if _may_be_divided(values, use):
        name = getattr(variable, "path", getattr(variable, "name", "?"))
        raise InvalidArgument(
            f"apply(grads, unscaled=True): the gradient of variable {name!r} is its new value, and a loss scale may "
            "have divided it: expected the gradient of the tape, or what unscale(grads, variables) returned for it, "
            "unchanged and in the same function. Or pass scaled gradients with apply(..., loss_scale=...)."
        )
    return grad


def _may_be_divided(values: tf.Tensor, use: Use) -> bool:
    if is_eager(values):
        return use.has_unscaled and not (use.unscaled is not None and use.unscaled.was_given(values))
    *_, last = _passed_on(values)
    if last.op.type in _DIVISIONS and any(map(_is_scale, _passed_on(last.op.inputs[1]))):
        return True
    return use.has_unscaled and (last.op.type in _KEPT or UNSCALED in kinds_behind([values]))


def _passed_on(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """A tensor of a graph, and what it is but for identities, casts and constant factors."""
    yield tensor
    while tensor.op.type in _PASS_ON or (tensor.op.type in _BY_CONSTANTS and tensor.op.inputs[1].op.type == "Const"):
        tensor = tensor.op.inputs[0]
        yield tensor


def _is_scale(tensor: tf.Tensor) -> bool:
    return kind_of(tensor) in (LOSS_SCALE, READ)
