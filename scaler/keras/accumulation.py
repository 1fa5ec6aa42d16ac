"""Gradient accumulation that works on several replicas, and whose windows end where they should on an overflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.windows import take_windows_over
from scaler.checks import SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient, overwrites


class Window(tf.Module):
    """Scaled gradients summed in float32 over the micro-batches of a window, by each replica for itself.

    The sum is at the scale of the micro-batch added last: where the scale moves inside of a window, it follows.

    A micro-batch that cannot be added spoils its window: nothing that is not finite is kept, the window ends where it
    would have ended, and its gradients then hold a NaN, so that the gate skips it.

    A checkpoint holds the sum over the replicas, and gives each an equal share of it back.

    Args:
        size: Micro-batches in a window, at least 2.
        targets: The variables that gradients belong to.
    """

    def __init__(self, size: int, targets: Sequence):
        super().__init__(name="window")
        self._size = size
        self._names = [getattr(target, "path", target.name) for target in targets]
        self._with_gradient: frozenset[int] = frozenset()
        self._overwrites = [overwrites(target) for target in targets]
        with tf.init_scope():
            self._count = replicas.local_variable(0, "micro_batches")
            # What the sums are scaled by; 0 if none was added yet, or a checkpoint does not say it.
            self._scale = replicas.local_variable(0.0, "sum_scale")
            self._spoiled = _summed(0.0, "spoiled")
            self._rejected = _summed(0.0, "rejected")
            self._sums = [_summed(tf.zeros(target.shape), "sum") for target in targets]

    @property
    def opens(self) -> tf.Tensor:
        """Whether the next micro-batch is the first of a window, scalar bool."""
        return tf.equal(self._count, 0)

    @property
    def rejected(self) -> tf.Tensor:
        """Micro-batches that could not be added so far, on this replica; scalar float32."""
        return tf.identity(self._rejected)

    def add(self, grads: Sequence[Gradient], loss_scale: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        """Adds a micro-batch.

        Args:
            grads: A gradient or None for each target.
            loss_scale: Scalar float32, what their loss was multiplied by.

        Returns:
            The mean over the window where there is a gradient, and whether this micro-batch completed it.

        Raises:
            InvalidArgument: If other targets have a gradient than in an earlier micro-batch.
        """
        self._check_same_targets(grads)
        first = self.opens
        earlier = [tf.where(first, tf.zeros_like(own), own) for own in map(tf.identity, self._sums)]
        added = list(map(_plus, self._followed(earlier, first, loss_scale), grads, self._overwrites))
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in added])
        spoiled = tf.logical_or(tf.logical_not(finite), tf.logical_and(self._spoiled > 0.0, tf.logical_not(first)))
        self._scale.assign(loss_scale)
        self._spoiled.assign(tf.cast(spoiled, tf.float32))
        self._rejected.assign_add(tf.cast(tf.logical_not(finite), tf.float32))
        for total, before, value in zip(self._sums, earlier, added, strict=True):
            total.assign(tf.where(finite, value, before))
        count = (tf.identity(self._count) + 1) % self._size
        self._count.assign(count)
        means = [
            None if grad is None else tf.identity(total) / (1.0 if kept else float(self._size))
            for grad, total, kept in zip(grads, self._sums, self._overwrites, strict=True)
        ]
        position = next((index for index, value in enumerate(means) if value is not None), None)
        if position is not None:
            means[position] = tf.where(spoiled, float("nan"), means[position])
        return means, tf.equal(count, 0)

    def _check_same_targets(self, grads: Sequence[Gradient]) -> None:
        # Which variables an update moves is fixed in a trace, and a trace knows no other micro-batch of its window.
        now = frozenset(position for position, grad in enumerate(grads) if grad is not None)
        before = self._with_gradient or now
        # Without any gradient the gate says so.
        for position in sorted(now ^ before) if now else ():
            has, had = ("no gradient", "one") if position in before else ("a gradient", "none")
            raise InvalidArgument(
                f"apply with gradient_accumulation_steps={self._size}: variable {self._names[position]!r} has {has} in "
                f"this micro-batch, and had {had} in an earlier one: expected the same variables in all, since their "
                "mean makes one step. Add 0.0 * tf.reduce_sum(variable) to the loss for each variable that it leaves "
                "out, or take an optimizer for each kind of batch."
            )
        self._with_gradient = before

    def _followed(self, sums: list, first: tf.Tensor, loss_scale: tf.Tensor) -> list:
        """The sums at another scale; NaN where that is beyond float32."""
        before = tf.identity(self._scale)
        moved = tf.logical_not(tf.reduce_any([first, before <= 0.0, tf.equal(before, loss_scale)]))
        factor = loss_scale / before
        # Below the normal numbers the sums would become zeros.
        factor = tf.where(factor >= SMALLEST_SCALE, factor, float("nan"))
        pairs = list(zip(sums, self._overwrites, strict=True))
        return tf.cond(moved, lambda: [own if kept else own * factor for own, kept in pairs], lambda: sums)


def take_over(inner: Any, targets: Sequence) -> Window | None:
    """Has `inner.apply` take the mean of a whole window, and returns what makes one; None if it does not accumulate.

    `inner.iterations` keeps its meaning: the windows that were applied. Learning rate schedules see the micro-batches.
    """
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if not steps:
        return None
    take_windows_over(inner)
    return Window(steps, targets)


@contextlib.contextmanager
def without(inner: Any) -> Iterator[None]:
    """Keeps Keras from making accumulators that nobody uses."""
    steps = inner.gradient_accumulation_steps
    inner.gradient_accumulation_steps = None
    try:
        yield
    finally:
        inner.gradient_accumulation_steps = steps


def _plus(total: tf.Tensor, grad: Gradient, overwriting: bool) -> tf.Tensor:
    if grad is None:
        return total
    # Cast first: making slices dense sums those of one index.
    own = tf.convert_to_tensor(tf.cast(grad, tf.float32))
    return tf.maximum(total, own) if overwriting else total + own


def _summed(value: Any, name: str) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
