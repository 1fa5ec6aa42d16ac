"""Many small gradients as one, so that measuring them takes one operation and not hundreds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from scaler import gradients


class Joined(NamedTuple):
    """Gradients, those of packed variables as one.

    Attributes:
        pieces: The joined one first, if there is one, then the others.
        sizes: The number of values from each that was joined.
        order: Where each stood, those that were joined first.
    """

    pieces: list
    sizes: list[int]
    order: list[int]

    @property
    def whole(self) -> tf.Tensor | None:
        """The joined gradient, or None."""
        return self.pieces[0] if self.sizes else None

    def split(self, pieces: list) -> list:
        """The gradients one by one as they stood, from `pieces`; those that were joined without their shapes."""
        parts = [*tf.split(pieces[0], self.sizes), *pieces[1:]] if self.sizes else pieces
        return [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]


def unjoined(grads: Sequence) -> Joined:
    """Gradients of which none are joined."""
    return Joined(list(grads), [], list(range(len(grads))))


def join(grads: Sequence, positions: Sequence[int], sizes: Sequence[int]) -> Joined:
    """Joins the gradients at these positions, which are tensors of these sizes; in float32 if dtypes differ."""
    chosen, rest = [grads[i] for i in positions], [i for i in range(len(grads)) if i not in set(positions)]
    alike = len({grad.dtype for grad in chosen}) == 1
    values = chosen if alike else gradients.to_float32(chosen)
    # A gradient of unknown shape must not pass as a longer one.
    values = [tf.reshape(value, [size]) for value, size in zip(values, sizes, strict=True)]
    return Joined([tf.concat(values, 0), *(grads[i] for i in rest)], list(sizes), [*positions, *rest])


def flat(tensors: Sequence) -> tf.Tensor:
    """The values of all tensors, one after the other."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
