"""Marks tensors as scaled or unscaled, and scales as those of one loss scaler.

In a graph a mark is an identity operation with a special name, which `upstream` finds behind whatever depends on it. In
eager mode there is no graph: a mark is an attribute of the tensor, and only that tensor is recognised.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager

SCALED = "halfstep_scaled"
UNSCALED = "halfstep_unscaled"
LOSS_SCALE = "halfstep_loss_scale"
READ = "halfstep_scale_read"
RETRIED = "halfstep_retried"
"""Of gradients that `retry` returned. Only those who ask for it see this mark; all others look through it."""
_KINDS = (SCALED, UNSCALED, LOSS_SCALE, READ)
_OWNER, _SCALE = "_halfstep_owner", "_halfstep_scale"


class Mark(NamedTuple):
    """A marked tensor that values come from.

    Attributes:
        tensor: The tensor.
        operation: What made it; the call or the loop, if it was made inside of a function. None in eager mode.
    """

    tensor: tf.Tensor
    operation: Any


Marks = dict[str, list[Mark]]
"""Marks by their kind."""


def mark(tensor: tf.Tensor, kind: str) -> tf.Tensor:
    """Returns the same tensor with a mark."""
    marked = tf.identity(tensor, name=kind)
    if is_eager(marked):
        setattr(marked, _attribute(kind), True)
    return marked


def marked_unscaled(grads: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
    """Marks gradients as unscaled."""
    return [gradients.limit(grad, lambda values, _: mark(values, UNSCALED)) for grad in grads]


def marked_retried(
    grads: Sequence[gradients.Gradient], loss_scale: tf.Tensor, owner: object
) -> list[gradients.Gradient]:
    """Marks gradients as retried: from here on they carry this scale of `owner`, whatever multiplied their loss."""

    def one(values: tf.Tensor, _: None) -> tf.Tensor:
        marked = owned(values, RETRIED, owner)
        setattr(marked, _SCALE, loss_scale)
        return marked

    return [gradients.limit(grad, one) for grad in grads]


def scale_of(marked: tf.Tensor) -> tf.Tensor:
    """The scale that a mark stands for: that of a retried gradient, or the marked scale itself."""
    return getattr(marked, _SCALE, marked)


def owned(loss_scale: tf.Tensor, kind: str, owner: object) -> tf.Tensor:
    """Marks a scale as one of `owner`."""
    marked = mark(loss_scale, kind)
    setattr(marked, _OWNER, weakref.ref(owner))
    return marked


def owner_of_scale(marked: tf.Tensor) -> object | None:
    """The owner of the scale that `owned` marked, or None."""
    return getattr(marked, _OWNER, lambda: None)()


def kind_of(tensor: tf.Tensor, also: tuple[str, ...] = ()) -> str | None:
    """The kind of a tensor's mark, or None; `also` are kinds that do not count else."""
    kinds = (*_KINDS, *also)
    if is_eager(tensor):
        return next((kind for kind in kinds if hasattr(tensor, _attribute(kind))), None)
    name = tensor.op.name.rsplit("/", 1)[-1] if tensor.op.type == "Identity" else ""
    return next((kind for kind in kinds if name.startswith(kind)), None)


def _attribute(kind: str) -> str:
    return f"_{kind}"
