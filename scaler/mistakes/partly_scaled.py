"""Finds gradients of an unscaled loss that are passed together with those of a scaled one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager
from scaler.mistakes.forgotten import nobody_scaled
from scaler.mistakes.marks import LOSS_SCALE, SCALED
from scaler.mistakes.sources import choices_of
from scaler.mistakes.upstream import Upstream

_SUMS = ("AddV2", "Add", "AddN", "Sub")
_PASS_ON = ("Identity", "Cast", "Reshape", "Neg")
_LOOKED_AT = 8


def partly_scaled(upstream: Upstream, variables: Sequence) -> str | None:
    """Returns a warning if only some gradients, or some of their parts or branches, come from a scaled loss, else None.

    A false alarm is worse than a miss. So the others count only if they are computed from the model, and nothing that
    they come from may hold a scale. Sums are seen where they are the last operations on a gradient: behind these a
    forward pass may have sums, too.

    Args:
        upstream: What the gradients come from.
        variables: The trained variables of the model, one for each gradient.
    """
    if LOSS_SCALE not in upstream.marks:
        return None
    # The "gradient" of some variables is their new value.
    pairs = [pair for pair in zip(upstream.grads, variables, strict=True) if not gradients.overwrites(pair[1])]
    values = [gradients.values_of(grad) for grad, _ in pairs if tf.is_tensor(grad)]
    parts = [part for value in values for part in _parts(value, upstream)]
    without = [part for part in parts if not upstream.is_marked(part)] + _plain_branches(upstream)
    if not any(nobody_scaled(upstream.of([part]), variables) for part in without[:_LOOKED_AT]):
        return None
    return (
        "apply(grads): the loss scale divides all of these gradients, but only a part of them comes from a scaled "
        "loss: the rest seem to be gradients of an unscaled loss or penalty, and would be too small by this factor. "
        "Pass the sum of all losses and penalties to scale(loss)."
    )


def _parts(value: tf.Tensor, upstream: Upstream) -> Iterator[tf.Tensor]:
    """The parts of a sum."""
    waiting = [value]
    while waiting:
        tensor = waiting.pop()
        if is_eager(tensor) or tensor.op.type not in (*_SUMS, *_PASS_ON) or not upstream.is_marked(tensor):
            yield tensor
        else:
            waiting += tensor.op.inputs if tensor.op.type in _SUMS else tensor.op.inputs[:1]


def _plain_branches(upstream: Upstream) -> list[tf.Tensor]:
    """The losses of branches that do not scale them, beside branches that do."""
    plain: list[tf.Tensor] = []
    for op in {one.operation for one in upstream.marks[LOSS_SCALE]} - {None}:
        for loss in op.outputs:
            choices = [own for own, _ in choices_of(loss, ())] if loss.shape.rank == 0 else []
            scaled = [SCALED in upstream.marks_before_stops([own]) for own in choices]
            plain += [own for own, is_scaled in zip(choices, scaled, strict=True) if any(scaled) and not is_scaled]
    return plain
