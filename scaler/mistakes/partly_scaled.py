"""Finds gradients of an unscaled loss that are passed together with those of a scaled one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager
from scaler.mistakes.forgotten import nobody_scaled
from scaler.mistakes.marks import LOSS_SCALE, SCALED, Marks, choices_of, marks_upstream, node_key

_SUMS = ("AddV2", "Add", "AddN", "Sub")
_PASS_ON = ("Identity", "Cast", "Reshape", "Neg")
_LOOKED_AT = 8


def partly_scaled(grads: Sequence[gradients.Gradient], found: Marks, variables: Sequence) -> bool:
    """Whether only some of these gradients, or of the parts or branches that they are made of, come from a scaled loss.

    A false alarm is worse than a miss. So the others count only if they are computed from the model, and nothing that
    they come from may hold a scale. Sums are seen where they are the last operations on a gradient: behind these a
    forward pass may have sums, too.

    Args:
        grads: Gradients.
        found: `marks_of(grads)`.
        variables: The trained variables of the model, one for each gradient.
    """
    if LOSS_SCALE not in found:
        return False
    # The "gradient" of some variables is their new value.
    pairs = [pair for pair in zip(grads, variables, strict=True) if not gradients.overwrites(pair[1])]
    values = [gradients.values_of(grad) for grad, _ in pairs if tf.is_tensor(grad)]
    parts = [part for value in values for part in _parts(value, found)]
    without = [part for part in parts if node_key((part, ())) not in found.marked] + _plain_branches(found)
    return any(nobody_scaled([part], variables) for part in without[:_LOOKED_AT])


def _parts(value: tf.Tensor, found: Marks) -> Iterator[tf.Tensor]:
    """The parts of a sum."""
    waiting = [value]
    while waiting:
        tensor = waiting.pop()
        if is_eager(tensor) or tensor.op.type not in (*_SUMS, *_PASS_ON) or node_key((tensor, ())) not in found.marked:
            yield tensor
        else:
            waiting += tensor.op.inputs if tensor.op.type in _SUMS else tensor.op.inputs[:1]


def _plain_branches(found: Marks) -> list[tf.Tensor]:
    """The losses of branches that do not scale them, beside branches that do."""
    plain: list[tf.Tensor] = []
    for op in {one.operation for one in found[LOSS_SCALE]} - {None}:
        for loss in op.outputs:
            choices = [own for own, _ in choices_of(loss, ())] if loss.shape.rank == 0 else []
            scaled = [SCALED in marks_upstream([own]) for own in choices]
            plain += [own for own, is_scaled in zip(choices, scaled, strict=True) if any(scaled) and not is_scaled]
    return plain
