"""Gradients summed in float32 over the micro-batches of a window."""

from __future__ import annotations

import tensorflow as tf

import scaler


class Window(tf.Module):
    """The sum of scaled gradients over `size` micro-batches, and the state from before the first of them.

    One micro-batch whose gradients cannot be added spoils its window: nothing non-finite is ever stored, the
    window ends where it would have ended, and `mean` then reports NaN so that the gate skips it.

    Args:
        size: Micro-batches in a window, at least 2.
        weights: The variables that gradients belong to.
        state: Non-trainable variables, put back at the end of a skipped window.
    """

    def __init__(self, size: int, weights: list, state: list):
        super().__init__(name="window")
        self._size = size
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64, name="micro_batches")
            self._whole = tf.Variable(True, trainable=False, name="whole")
            self._sums = [tf.Variable(tf.zeros(w.shape), trainable=False, name="sum") for w in weights]
            self._before = [tf.Variable(v, trainable=False, name="before") for v in state]
        self._state = list(state)

    def open(self) -> scaler.Snapshot:
        """Starts a window if none is open, and returns the non-trainable state from before its first micro-batch."""
        tf.cond(tf.equal(self._count, 0), self._start, lambda: None)
        return scaler.Snapshot(tuple(self._state), tuple(tf.identity(v) for v in self._before))

    def add(self, grads: list) -> None:
        """Adds a micro-batch: one gradient, or None, for each weight."""
        sums = [_plus(total, grad) for total, grad in zip(self._sums, grads, strict=True)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(s)) for s in sums])
        self._whole.assign(tf.logical_and(self._whole, finite))
        for total, value in zip(self._sums, sums, strict=True):
            total.assign(tf.where(finite, value, total))
        self._count.assign_add(1)

    @property
    def whole(self) -> tf.Tensor:
        """Whether every micro-batch of this window could be added, scalar bool."""
        return tf.identity(self._whole)

    @property
    def complete(self) -> tf.Tensor:
        """Whether the window has all its micro-batches, scalar bool."""
        return tf.greater_equal(self._count, self._size)

    def mean(self, grads: list) -> list:
        """The mean gradient of the window for every weight that has one in `grads`; NaN if the window is spoiled."""
        factor = tf.where(self._whole, 1.0 / self._size, float("nan"))
        return [None if grad is None else total * factor for total, grad in zip(self._sums, grads, strict=True)]

    def close(self) -> None:
        """Empties the window."""
        self._count.assign(0)

    def _start(self) -> None:
        self._whole.assign(True)
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        for saved, variable in zip(self._before, self._state, strict=True):
            saved.assign(variable)


def _plus(total: tf.Variable, grad) -> tf.Tensor:
    if grad is None:
        return tf.identity(total)
    return total + tf.cast(tf.convert_to_tensor(grad), tf.float32)
