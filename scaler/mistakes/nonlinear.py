"""Finds gradients of a function of a scaled loss that are not the loss scale times those of a loss.

The backward pass multiplies by the scale what it has found so far: the derivative of the function by the scaled loss.
That must not depend on the scale. For sums and multiples of scaled losses, and for the larger of two, it does not. It
does for a square, a root, a product of two, and a limit that does not move with the scale. Eager mode shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from scaler.backend.graphs import calls_functions, is_eager
from scaler.errors import InvalidArgument
from scaler.mistakes.carried import is_of_a_loss
from scaler.mistakes.degrees import Degree, depends
from scaler.mistakes.degrees_upstream import DegreesUpstream
from scaler.mistakes.forgotten import may_be_scale
from scaler.mistakes.marks import LOSS_SCALE, READ, kind_of, owner_of_scale
from scaler.mistakes.sources import Node, node_key
from scaler.mistakes.upstream import Upstream

_HAND_ON = ("Placeholder", "Identity", "Cast", "Reshape")
_BACKWARD = ("gradient_tape/", "gradients/")
"""Parts of the names of operations in a backward pass, outside and inside of a function that was called."""


def refuse_nonlinear(method: str, upstream: Upstream, owner: object, variables: Sequence = ()) -> None:
    """Raises `InvalidArgument` if a derivative by a scaled loss certainly depends on the scale.

    Args:
        method: Who asks, for the error.
        upstream: What the gradients come from.
        owner: The `Calls` of the loss scaler, or None if nothing has to be checked.
        variables: The trained variables of the model, as far as they are known.
    """
    if tf.executing_eagerly() or owner is None:
        return
    degree = next(filter(depends, degrees_of_derivatives(upstream, owner, variables)), None)
    if degree is not None:
        raise _not_proportional(method, degree)


def refuse_other_powers(method: str, upstream: Upstream, owner: object, variables: Sequence = ()) -> None:
    """Raises `InvalidArgument` if gradients certainly grow with a power of the scale other than the first.

    A root of the scale, or its square, multiplied the loss by hand. `refuse_nonlinear` sees what is done to the result
    of `scale`.

    Args:
        method: Who asks, for the error.
        upstream: What the gradients come from.
        owner: The `Calls` of the loss scaler.
        variables: The trained variables of the model, as far as they are known.
    """
    marks = [one.tensor for kind in (LOSS_SCALE, READ) for one in upstream.marks.get(kind, ())]
    read = [marked for marked in marks if owner_of_scale(marked) is owner and not is_of_a_loss(marked)]
    if tf.executing_eagerly() or not read:
        return
    degrees = DegreesUpstream(owner, may_be_scale(upstream, variables))
    for degree in (degrees.of((value, ())) for value in upstream.values):
        # One of degree 0 does not come from the scale: other rules judge it.
        if isinstance(degree, float) and degree not in (0.0, 1.0):
            raise _not_proportional(method, degree - 1.0)


def _not_proportional(method: str, degree: Degree) -> InvalidArgument:
    return InvalidArgument(
        f"{method}(grads): these gradients are not the loss scale times those of a loss: {_how(degree)}. Something "
        "that is not proportional to the scaled loss was computed from it and differentiated, such as a square, a "
        "root, a logarithm, a product of two scaled losses or a limit: expected gradients of a scaled loss, or of "
        "sums and multiples of scaled losses. Compute the function first, and pass its result to scale(loss)."
    )


def degrees_of_derivatives(upstream: Upstream, owner: object, variables: Sequence) -> Iterator[Degree]:
    """The degrees, in the scale of `owner`, of the derivatives by what that scale multiplied.

    A false alarm is worse than a miss. So a degree is None wherever an operation, or where a tensor comes from, is not
    known.
    """
    marks = [one.tensor for kind in (LOSS_SCALE, READ) for one in upstream.marks.get(kind, ())]
    if any(owner_of_scale(marked) is owner for marked in marks):
        degrees = DegreesUpstream(owner, may_be_scale(upstream, variables))
        yield from map(degrees.of, _derivatives(upstream, owner))


def _how(degree: Degree) -> str:
    if not isinstance(degree, float):
        return "they do not grow in proportion to it"
    return f"they grow with its power of {degree + 1.0:g}" if degree != -1.0 else "they do not grow with it"


def _derivatives(upstream: Upstream, owner: object) -> Iterator[Node]:
    """What the backward pass multiplies by a scale of `owner`."""
    handed_on = {node_key(node): sources for node, sources in upstream.edges if _hands_on(node[0])}
    for (tensor, _), sources in upstream.edges:
        if is_eager(tensor) or tensor.op.type != "Mul" or len(sources) != 2:
            continue
        for factor, other in (sources, sources[::-1]):
            scale = _mark_behind(factor, handed_on)
            # A scale that was read may multiply something else, such as a limit.
            if scale is not None and owner_of_scale(scale) is owner and (is_of_a_loss(scale) or _is_backward(tensor)):
                yield other


def _hands_on(tensor: tf.Tensor) -> bool:
    return not is_eager(tensor) and (tensor.op.type in _HAND_ON or calls_functions(tensor.op))


def _mark_behind(node: Node, handed_on: dict[tuple, list[Node]]) -> tf.Tensor | None:
    """The scale that a tensor is, also as a 16-bit number or an argument of a function, or None."""
    for _ in range(len(handed_on) + 1):
        kind = kind_of(node[0])
        if kind is not None:
            return node[0] if kind in (LOSS_SCALE, READ) else None
        sources = handed_on.get(node_key(node), ())
        if len(sources) != 1:
            return None
        (node,) = sources
    return None


def _is_backward(tensor: tf.Tensor) -> bool:
    return any(part in tensor.op.name for part in _BACKWARD)
