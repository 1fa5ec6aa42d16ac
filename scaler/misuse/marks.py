"""Marks tensors as scaled or unscaled, and scales as those of one loss scaler.

In a graph a mark is an identity operation with a special name, which a pass over the trace finds (`trace`). In
eager mode there is no graph: a mark is an attribute of the tensor, and only that tensor is recognised.

Where a gradient passes a rescale of a `Layerwise`, its graph is marked until `Layerwise.unscale` is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager
from scaler.backend.replicas import native
from scaler.errors import InvalidArgument

_PREFIX = "halfstep_"
SCALED = "halfstep_scaled"
UNSCALED = "halfstep_unscaled"
LOSS_SCALE = "halfstep_loss_scale"
READ = "halfstep_scale_read"
RETRIED = "halfstep_retried"
"""Of gradients that `retry` returned. Only those who ask for it see this mark; all others look through it."""
_KINDS = (SCALED, UNSCALED, LOSS_SCALE, READ)
_OWNER, _SCALE, _GIVEN, _LAST = "_halfstep_owner", "_halfstep_scale", "_halfstep_given", "_halfstep_last"
_SAME = object()
_RESCALED: weakref.WeakKeyDictionary[Any, tuple[object, tuple]] = weakref.WeakKeyDictionary()
"""Of each `Layerwise` whose gradients carry its scales: where, and the variables of its groups."""
_SMALL = 2**16
"""Elements. A history of a float8 layer has 1024."""


def mark(tensor: tf.Tensor, kind: str) -> tf.Tensor:
    """Returns the same tensor with a mark."""
    marked = tf.identity(tensor, name=kind)
    if is_eager(marked):
        setattr(marked, f"_{kind}", True)
    return marked


def marked_unscaled(
    grads: Sequence[gradients.Gradient], given: Sequence[gradients.Gradient], untouched: Sequence[bool]
) -> list[gradients.Gradient]:
    """Marks gradients as unscaled. They remember what they were: see `given_to_unscale`.

    Args:
        grads: The results.
        given: The gradients from which they were made.
        untouched: For each whether it is what was given, in a wider dtype.
    """

    def one(grad: gradients.Gradient, before: gradients.Gradient, same: bool) -> gradients.Gradient:
        def marked(values: tf.Tensor, _: None) -> tf.Tensor:
            result = mark(values, UNSCALED)
            if same:
                setattr(result, _GIVEN, _SAME)
            elif isinstance(before, tf.Tensor) and (not is_eager(before) or before.shape.num_elements() <= _SMALL):
                setattr(result, _GIVEN, before)  # Which is kept alive: in a graph that is nothing.
            return result

        return gradients.limit(grad, marked)

    return list(map(one, grads, given, untouched))


def as_given(grads: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
    """The same gradients, in which no new value was ever divided, marked so that `given_to_unscale` knows it."""
    for values in (gradients.values_of(grad) for grad in grads if grad is not None):
        setattr(values, _GIVEN, _SAME)
    return list(grads)


def given_to_unscale(values: tf.Tensor) -> tf.Tensor | None:
    """The gradient of which `unscale` made these values; None if they are no such result, or it is forgotten."""
    given = getattr(values, _GIVEN, None)
    return values if given is _SAME else given


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


def of_last_loss(marked: tf.Tensor) -> tf.Tensor:
    """Lets a marked scale remember that it is the one which multiplied the last loss, whatever moved since."""
    setattr(marked, _LAST, True)
    return marked


def is_of_last_loss(marked: tf.Tensor) -> bool:
    """Whether a marked scale is one that `of_last_loss` was given."""
    return getattr(marked, _LAST, False)


def kind_of(tensor: tf.Tensor, also: tuple[str, ...] = ()) -> str | None:
    """The kind of a tensor's mark, or None; `also` are kinds that do not count else."""
    name = ""
    if not is_eager(tensor):
        name = tensor.op.name.rsplit("/", 1)[-1] if tensor.op.type == "Identity" else ""
        if not name.startswith(_PREFIX):
            return None
    for kind in (*_KINDS, *also):
        if name.startswith(kind) or hasattr(tensor, f"_{kind}"):
            return kind
    return None


def mark_rescaled(layerwise: Any, variables: tuple) -> None:
    """To be called where a gradient passes a rescale, with the variables of its `Layerwise`."""
    _RESCALED[layerwise] = _here(), variables


def mark_unscaled(layerwise: Any) -> None:
    """To be called where the scales of the groups are removed again."""
    _RESCALED.pop(layerwise, None)


def check_rescaled(weights: Iterable) -> None:
    """Refuses gradients that still carry the scales of a rescaled model's groups.

    Args:
        weights: What they belong to.

    Raises:
        InvalidArgument: If one is a variable of such a model.
    """
    own = {id(native(weight)) for weight in weights} if _RESCALED else set()
    for layerwise, (place, variables) in list(_RESCALED.items()):
        found = next((one for one in variables if id(one) in own), None)
        if found is not None and place == _here():
            mark_unscaled(layerwise)  # The next step is another one.
            raise InvalidArgument(
                f"apply: the gradient of {found.name.split(':')[0]!r} passed a rescale, and still carries the scale of "
                "its group. Expected the gradients of layerwise.gradient(tape, scaled, variables), with the second "
                "object that hs.layerwise.insert_rescales returned; or use hs.TrainStep(..., layerwise=layerwise)."
            )


def _here() -> object:
    """The graph that is traced here, or that there is none."""
    return None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())
