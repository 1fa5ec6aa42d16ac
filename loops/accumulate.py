"""Gradients summed in float32 over the micro-batches of a window."""

from __future__ import annotations

import tensorflow as tf

import scaler


class Window(tf.Module):
    """The sum of scaled gradients over `size` micro-batches, and the state from before the first of them.

    One micro-batch whose gradients cannot be added spoils its window: nothing non-finite is ever stored, the
    window ends where it would have ended, and `gradients` then reports NaN so that the gate skips it. Each replica
    sums for itself; the gate sums over replicas, once a window.

    Args:
        size: Micro-batches in a window, at least 2.
        weights: The variables that gradients belong to.
        state: Non-trainable variables, put back at the end of a skipped window.
    """

    def __init__(self, size: int, weights: list, state: list):
        super().__init__(name="window")
        self._size = size
        self._state = list(state)
        with tf.init_scope():
            self._count = _local(0, "micro_batches")
            self._whole = _local(True, "whole")
            self._sums = [_local(tf.zeros(weight.shape), "sum") for weight in weights]
            self._before = [_local(tf.convert_to_tensor(variable), "before") for variable in state]

    def open(self) -> scaler.Snapshot:
        """Starts a window if none is open, and returns the non-trainable state from before its first micro-batch."""
        tf.cond(tf.equal(self._count, 0), self._start, lambda: None)
        return scaler.Snapshot(tuple(self._state), tuple(tf.identity(variable) for variable in self._before))

    def add(self, grads: list) -> None:
        """Adds a micro-batch: one gradient, or None, for each weight."""
        sums = [_plus(total, grad) for total, grad in zip(self._sums, grads, strict=True)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in sums])
        self._whole.assign(tf.logical_and(self._whole, finite))
        for total, value in zip(self._sums, sums, strict=True):
            total.assign(tf.where(finite, value, total))
        self._count.assign((self._count + 1) % self._size)

    @property
    def whole(self) -> tf.Tensor:
        """Whether every micro-batch of this window could be added, scalar bool."""
        return tf.identity(self._whole)

    @property
    def complete(self) -> tf.Tensor:
        """Whether the micro-batch added last was the last of its window, scalar bool."""
        return tf.equal(self._count, 0)

    def gradients(self, grads: list) -> list:
        """The sum for every weight that has a gradient in `grads`; with NaN in it if the window is spoiled."""
        sums = [None if grad is None else tf.identity(total) for total, grad in zip(self._sums, grads, strict=True)]
        first = next((position for position, value in enumerate(sums) if value is not None), None)
        if first is not None:
            sums[first] = tf.where(self._whole, sums[first], float("nan"))
        return sums

    def _start(self) -> None:
        self._whole.assign(True)
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        for saved, variable in zip(self._before, self._state, strict=True):
            saved.assign(tf.convert_to_tensor(variable))


def _local(value, name: str) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _plus(total: tf.Variable, grad) -> tf.Tensor:
    if grad is None:
        return tf.identity(total)
    # Cast first: making slices dense sums those of one index.
    return total + tf.convert_to_tensor(tf.cast(grad, tf.float32))
