"""Gradient accumulation for several replicas, with windows that keep their length on an overflow."""

from __future__ import annotations

import types
from collections.abc import Sequence

import tensorflow as tf

from scaler.backend.replicas import local_variable
from scaler.checks import SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient, largest, overwrites, wide_dtype

_SUM = tf.VariableAggregation.SUM


class Window(tf.Module):
    """Sums scaled gradients in float32 over the micro-batches of a window. Each replica has sums of its own.

    The sum carries the scale of the last micro-batch. If the scale moves inside a window, the sum is rescaled.

    A non-finite micro-batch spoils its window. The sums never hold a non-finite value, and the window ends where it
    would have ended. The gradients that were not finite are then NaN, which makes the gate skip the step and name them.
    A process that goes on in the middle of a spoiled window names the first variable: no checkpoint holds which it was.

    The inner optimizer's `iterations` keeps its meaning, the number of applied windows. Learning rate schedules still
    count micro-batches.

    Of a variable that takes its gradient as its value it holds the largest so far in place of a sum.

    A checkpoint holds the sum over the replicas. A restore gives each replica an equal share of it: of the largest
    values inside of a window their mean.

    Args:
        size: Micro-batches in a window, at least 2.
        targets: The variables that the gradients belong to.
        rejected: A scalar float32 variable for the number of non-finite micro-batches, of each replica its own.
    """

    def __init__(self, size: int, targets: Sequence, rejected: tf.Variable):
        super().__init__(name="window")
        self._size, self._rejected = size, rejected
        self._names = [getattr(target, "path", target.name) for target in targets]
        self._with_gradient: frozenset[int] = frozenset()
        self._overwrites = [overwrites(target) for target in targets]
        with tf.init_scope():
            self._count = local_variable(0, "micro_batches")
            # The scale of the sums; 0 before the first micro-batch, or if a checkpoint does not hold it.
            self._scale = local_variable(0.0, "sum_scale")
            self._spoiled = local_variable(0.0, "spoiled", _SUM)
            # Neither checkpoints nor files of the optimizer hold it.
            self._guilty = types.SimpleNamespace(variable=local_variable(tf.zeros([len(targets)], tf.bool), "guilty"))
            self._sums = [local_variable(tf.zeros(one.shape, wide_dtype(one)), "sum", _SUM) for one in targets]

    def add(self, grads: Sequence[Gradient], loss_scale: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        """Adds a micro-batch.

        Args:
            grads: A gradient or None for each target.
            loss_scale: Scalar float32, the scale of their loss.

        Returns:
            The mean over the window for each target with a gradient, and whether this micro-batch completed the window.

        Raises:
            InvalidArgument: If the targets with a gradient differ from those of an earlier micro-batch.
        """
        self._check_same_targets(grads)
        first = tf.equal(self._count, 0)
        earlier = [tf.where(first, tf.zeros_like(own), own) for own in map(tf.identity, self._sums)]
        followed = self._followed(earlier, first, loss_scale)
        added = [
            _largest(total, grad, first) if kept else _plus(total, grad)
            for total, grad, kept in zip(followed, grads, self._overwrites, strict=True)
        ]
        sound = tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in added])
        finite = tf.reduce_all(sound)
        guilty = tf.logical_or(tf.logical_not(sound), tf.logical_and(self._guilty.variable, tf.logical_not(first)))
        self._guilty.variable.assign(guilty)
        spoiled = tf.logical_or(tf.logical_not(finite), tf.logical_and(self._spoiled > 0.0, tf.logical_not(first)))
        self._scale.assign(loss_scale)
        self._spoiled.assign(tf.cast(spoiled, tf.float32))
        self._rejected.assign_add(tf.cast(tf.logical_not(finite), tf.float32))
        for total, before, value in zip(self._sums, earlier, added, strict=True):
            total.assign(tf.where(finite, value, before))
        count = (tf.identity(self._count) + 1) % self._size
        self._count.assign(count)
        named = tf.unstack(self._named(grads, guilty, spoiled))
        means = [
            None if grad is None else _nan_if(bad, total) / (1.0 if kept else float(self._size))
            for grad, total, kept, bad in zip(grads, self._sums, self._overwrites, named, strict=True)
        ]
        return means, tf.equal(count, 0)

    def _named(self, grads: Sequence[Gradient], guilty: tf.Tensor, spoiled: tf.Tensor) -> tf.Tensor:
        """Those that spoiled the window, bool [targets]: the first where that is not known."""
        with_gradient = [position for position, grad in enumerate(grads) if grad is not None]
        first = tf.constant([[position] == with_gradient[:1] for position in range(len(grads))])
        unknown = tf.logical_and(spoiled, tf.logical_not(tf.reduce_any(guilty)))
        return tf.logical_or(guilty, tf.logical_and(unknown, first))

    def _check_same_targets(self, grads: Sequence[Gradient]) -> None:
        # Which variables an update moves is fixed in a trace, and a trace knows no other micro-batch of its window.
        now = frozenset(position for position, grad in enumerate(grads) if grad is not None)
        before = self._with_gradient or now
        # The gate refuses a micro-batch without any gradient.
        for position in sorted(now ^ before) if now else ():
            has, had = ("no gradient", "one") if position in before else ("a gradient", "none")
            raise InvalidArgument(
                f"apply with gradient_accumulation_steps={self._size}: variable {self._names[position]!r} has {has} in "
                f"this micro-batch, and had {had} in an earlier one: expected gradients for the same variables in all "
                "micro-batches, since their mean makes one step. Add 0.0 * tf.reduce_sum(variable) to the loss for "
                "each variable that it leaves out, or use one optimizer for each kind of batch."
            )
        self._with_gradient = before

    def _followed(self, sums: list, first: tf.Tensor, loss_scale: tf.Tensor) -> list:
        """The sums rescaled to `loss_scale`; NaN if the factor underflows float32."""
        before = tf.identity(self._scale)
        factor = loss_scale / before
        # A factor below the smallest normal number would turn the sums into zeros.
        factor = tf.where(factor >= SMALLEST_SCALE, factor, float("nan"))
        factor = tf.where(tf.logical_or(first, before <= 0.0), 1.0, factor)
        pairs = zip(sums, self._overwrites, strict=True)
        return [own if kept else own * tf.cast(factor, own.dtype) for own, kept in pairs]


def _plus(total: tf.Tensor, grad: Gradient) -> tf.Tensor:
    # Cast first: the conversion to a dense tensor sums duplicate indices.
    return total if grad is None else total + tf.convert_to_tensor(tf.cast(grad, total.dtype))


def _largest(known: tf.Tensor, grad: Gradient, first: tf.Tensor) -> tf.Tensor:
    """The largest new values of a window, of which `first` says whether it begins."""
    if grad is None:
        return known
    new = tf.convert_to_tensor(tf.cast(grad, known.dtype))
    return tf.where(first, new, largest(tf.stack([known, new])))


def _nan_if(bad: tf.Tensor, total: tf.Variable) -> tf.Tensor:
    return tf.where(bad, tf.constant(float("nan"), total.dtype), tf.identity(total))
