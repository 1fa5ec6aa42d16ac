"""A part's turn, which comes at every n-th call: decided in the graph, so that nothing is computed in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.accumulation import local_variable
from loops.step.probing import Seen, unseen


class Taken(NamedTuple):
    """The forward and backward pass of a part.

    Attributes:
        loss: Scalar float32, unscaled.
        extra: The scalars that the loss function returned with it.
        grads: Scaled gradients, or None.
        again: From an output gradient to the same gradients, for a retry; None if they cannot be had again.
        seen: What its probes measured; None without probes.
    """

    loss: tf.Tensor
    extra: dict[str, tf.Tensor]
    grads: list
    again: Callable[[tf.Tensor], list] | None = None
    seen: Seen | None = None


class Turns(tf.Module):
    """Counts the calls of a step, and tells whose turn it is.

    Each replica counts by itself. A checkpoint holds the count, so that a resumed run goes on in the middle of a turn.

    Args:
        window: Calls that make one step.
    """

    def __init__(self, window: int):
        super().__init__(name="turns")
        self._window = window
        with tf.init_scope():
            self._calls = local_variable(tf.constant(0, tf.int64), "calls")

    def due(self, every: int) -> tf.Tensor:
        """Whether it is the turn of a part in this call, scalar bool."""
        return tf.equal((self._calls // self._window + 1) % every, 0)

    def nearest(self, every: int) -> int:
        """How many calls from the next one it is to a part's turn: 0 in its turn, else back to the last one.

        Before the first turn it is the number of calls until then. Called outside of a step, on one replica.
        """
        calls = int(self._calls)
        step = calls // self._window + 1
        if step % every == 0:
            return 0
        return (step // every * every or every) * self._window - 1 - calls

    def go_back(self, calls: int) -> None:
        """As if so many calls had not been, on every replica; called outside of a step."""
        for part in getattr(self._calls, "values", (self._calls,)):
            part.assign_sub(calls)

    def end(self) -> None:
        """Counts this call."""
        self._calls.assign_add(1)


@scaler.authoring.no_autograph
def taken_if(due: tf.Tensor, take: Callable[[], Taken]) -> Taken:
    """What `take` returns where it is due; else nothing is computed, and numbers are NaN, gradients and counts 0.

    So is what probes measure: NaN, but for counts and largest magnitudes, which are 0.

    Args:
        due: Scalar bool.
        take: The forward and backward pass of a part.
    """
    found: list[Taken] = []

    @scaler.authoring.no_autograph
    def taken() -> tuple[tf.Tensor, list, list, list]:
        found[:] = [take()]
        (one,) = found
        return one.loss, list(one.extra.values()), [grad for grad in one.grads if grad is not None], _tensors(one.seen)

    @scaler.authoring.no_autograph
    def left_out() -> tuple[tf.Tensor, list, list, list]:
        extra = [nothing(value.dtype) for value in found[0].extra.values()]
        grads = [_zeros(grad) for grad in found[0].grads if grad is not None]
        return nothing(tf.float32), extra, grads, _tensors(unseen(found[0].seen))

    loss, extra, grads, seen = tf.cond(due, taken, left_out)
    rest = iter(grads)
    whole = [None if grad is None else next(rest) for grad in found[0].grads]
    measured = None if not seen else Seen(scaler.observe.Measured(*seen[:2]), *(seen[2:] or [None]))
    return Taken(loss, dict(zip(found[0].extra, extra, strict=True)), whole, seen=measured)


def nothing(dtype: tf.DType) -> tf.Tensor:
    """What a part returns as a scalar where it is not its turn."""
    return tf.constant(float("nan"), dtype) if dtype.is_floating else tf.zeros([], dtype)


def _tensors(seen: Seen | None) -> list[tf.Tensor]:
    return [] if seen is None else [one for one in (*seen.rows, seen.attention) if one is not None]


def _zeros(grad: tf.Tensor | tf.IndexedSlices) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values, indices = tf.zeros([0, *grad.values.shape[1:]], grad.dtype), tf.zeros([0], grad.indices.dtype)
        shape = None if grad.dense_shape is None else tf.constant(grad.shape.as_list(), grad.dense_shape.dtype)
        return tf.IndexedSlices(values, indices, shape)
    return tf.zeros(grad.shape, grad.dtype)
