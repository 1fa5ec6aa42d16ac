"""Gradients summed in float32 over the micro-batches of a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import scaler
from loops.step.losses import positive, replica_count, sum_over_replicas


class MicroBatches(tf.Module):
    """The sum of scaled gradients over `size` micro-batches, and the state from before the first of them.

    The sum carries the scale of the last added micro-batch: if the scale moves within a window, the sum is rescaled.

    A micro-batch with a non-finite gradient spoils its window. The sums stay finite and the window ends at its usual
    end, but `mean` then holds an infinity or a NaN where the first such micro-batch had one, so the gate skips the
    window and names the right weight. Each replica keeps its own sums; the gate sums over replicas, once per window.

    `scaler.LossScaleOptimizer` has separate sums, for a Keras optimizer that accumulates: they keep no state of the
    model, and a checkpoint from another number of replicas can be loaded into them.

    Gradients are of a micro-batch's share of the mean over a full window. A window that ends before it is full, or
    whose micro-batches have weights, has the mean of what it got.

    Args:
        sizes: Micro-batches per window, by the number of applied steps from which they hold, from 0 on.
        weights: The variables that the gradients belong to.
        state: Of layers, known beforehand: restored at the end of a skipped window.
        may_end_early: Whether `ends` may end a window that is not full.

    Attributes:
        ends: A variable, whether the next micro-batch ends its window, full or not.
    """

    def __init__(self, sizes: Mapping[int, int], weights: list, state: list, may_end_early: bool = False):
        super().__init__(name="window")
        self._sizes = tuple(sorted(sizes.items()))
        self._may_end_early = may_end_early
        self._state = list(state)
        self._names = [getattr(weight, "path", weight.name) for weight in weights]
        self._with_gradient: frozenset[int] = frozenset()
        # As the scales of Keras's float8 layers do. Of their new values the largest counts, not a sum.
        self._overwrites = list(map(scaler.gradients.overwrites, weights))
        with tf.init_scope():
            self._count = local_variable(tf.constant(0, tf.int64), "micro_batches")
            # Added up where a run goes on with other replicas; of largest values the mean is taken there.
            self._sums = [
                local_variable(tf.zeros(weight.shape, _sum_dtype(weight)), "sum", _FIRST if overwrites else _SUM)
                for weight, overwrites in zip(weights, self._overwrites, strict=True)
            ]
            self._taken = local_variable(tf.constant(0, tf.int64), "taken")
            self._length = local_variable(tf.constant(0, tf.int64), "length")
            self.ends = local_variable(False, "ends")
            # The sum of the weights of losses that have them, and of the losses, each times its weight.
            self._weight = local_variable(0.0, "weight", _SUM)
            self._loss = local_variable(0.0, "loss", _SUM)
            # The scale of the sums; 0 if they are empty, or from a checkpoint without this variable.
            self._scale = local_variable(0.0, "sum_scale")
            # For each weight the `_kind` of its sum in the micro-batch that spoiled the window.
            self._broken = local_variable(tf.zeros([len(weights)], tf.int64), "broken", _SUM)
            self._before = [local_variable(tf.convert_to_tensor(variable), "before") for variable in state]

    def open(self, now: scaler.Snapshot) -> scaler.Snapshot:
        """Starts a window if none is open, and returns the state of layers from before its first micro-batch.

        Args:
            now: What the micro-batch has moved, with the values before it.
        """
        values = {id(variable): value for variable, value in zip(now.variables, now.values, strict=True)}
        new = [one for one in now.variables if all(one is not known for known in self._state)]
        if new:
            tf.distribute.get_replica_context().merge_call(lambda strategy: self._keep(new))
        # What no micro-batch of this window has moved before is as it was at its start.
        first = set(map(id, new)) if tf.executing_eagerly() else ()
        for saved, variable in zip(self._before, self._state, strict=True):
            opens = tf.logical_or(self._opens, id(variable) in first)
            saved.assign(tf.where(opens, values.get(id(variable), variable), saved))
        return scaler.Snapshot(tuple(self._state), tuple(tf.identity(saved) for saved in self._before))

    def _keep(self, state: list) -> None:
        """Makes room for the values of more variables, once for all replicas."""
        with scaler.authoring.outside_the_graph():
            self._before += [local_variable(tf.convert_to_tensor(variable), "before") for variable in state]
        self._state += state

    def length(self, applied: tf.Tensor) -> int | tf.Tensor:
        """Micro-batches of the window that is open, or of the next one if none is.

        Args:
            applied: How many steps were applied, scalar int64.
        """
        if len(self._sizes) == 1:
            return self._sizes[0][1]
        return tf.where(self._opens, _at(self._sizes, applied), self._length)

    def add(
        self,
        grads: list,
        loss_scale: tf.Tensor,
        may_branch: bool,
        *,
        length: int | tf.Tensor,
        loss: tf.Tensor | None = None,
        weight: tf.Tensor | None = None,
    ) -> None:
        """Adds a micro-batch.

        Args:
            grads: A gradient, or None, for each weight.
            loss_scale: Scalar float32, the factor of their loss.
            may_branch: Whether non-finite gradients may be examined in a branch of the graph.
            length: Of this window, from `length`.
            loss: Its loss, scalar float32.
            weight: What the micro-batch counts for, scalar float32; None if all count alike.

        Raises:
            scaler.InvalidArgument: If other weights have a gradient than in an earlier micro-batch.
        """
        self._check_same_weights(grads)
        # The sums are always finite, so a factor of 0 clears them.
        factor = tf.where(self._opens, 0.0, self._factor(loss_scale))
        sums = [
            self._largest(total, grad) if overwrites else _plus(total, factor, grad, weight)
            for total, grad, overwrites in zip(self._sums, grads, self._overwrites, strict=True)
        ]
        if weight is not None:
            known = tf.where(tf.math.is_finite(weight), weight, 0.0)
            self._weight.assign(tf.where(self._opens, 0.0, self._weight) + known)
        if loss is not None and (self._may_end_early or weight is not None):
            weighted = loss / replica_count() if weight is None else loss * weight
            total = tf.where(self._opens, 0.0, self._loss) + weighted
            self._loss.assign(tf.where(tf.math.is_finite(total), total, self._loss))
        self._take(sums, may_branch)
        self._scale.assign(loss_scale)
        length = tf.cast(length, tf.int64)
        self._length.assign(length)
        self._taken.assign(self._count + 1)
        ends = self._taken >= length
        if self._may_end_early:
            ends = tf.logical_or(ends, self.ends)
            self.ends.assign(False)
        self._count.assign(tf.where(ends, tf.zeros_like(self._count), self._taken))

    @property
    def _opens(self) -> tf.Tensor:
        return tf.equal(self._count, 0)

    @property
    def whole(self) -> tf.Tensor:
        """Whether every micro-batch of this window so far was finite, scalar bool."""
        return tf.reduce_all(tf.equal(self._broken, 0))

    @property
    def complete(self) -> tf.Tensor:
        """Whether the last added micro-batch was the last of its window, scalar bool."""
        return self._opens

    def mean(self, grads: list, weighted: bool = False) -> tuple[list, tf.Tensor | None]:
        """The mean gradient for every weight with one in `grads`, and this replica's share of the mean loss.

        A gradient has an infinity or a NaN where one spoiled the window. The loss, scalar float32, is None where
        `scale` has seen its shares.

        Args:
            grads: Those of the micro-batch that was added last.
            weighted: Whether micro-batches have weights.
        """
        broken = tf.identity(self._broken)
        spoiled = tf.where(broken < _NAN, float("inf"), float("nan"))
        divisor = self._divisor(weighted)
        factor = None if divisor is None else tf.cast(self._length, tf.float32) / divisor

        def found(position: int) -> tf.Tensor:
            total = tf.identity(self._sums[position])
            if factor is not None and not self._overwrites[position]:
                total *= tf.cast(factor, total.dtype)
            return tf.where(tf.equal(broken[position], 0), total, tf.cast(spoiled[position], total.dtype))

        means = [None if grad is None else found(position) for position, grad in enumerate(grads)]
        return means, None if divisor is None else self._loss / divisor

    def _divisor(self, weighted: bool) -> tf.Tensor | None:
        """What makes a mean of the window's sums, scalar float32; None where they are the mean of a full window."""
        if weighted:
            return positive(sum_over_replicas(self._weight))
        return tf.cast(self._taken, tf.float32) if self._may_end_early else None

    def _largest(self, known: tf.Variable, grad: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor:
        """The largest new values of a window so far."""
        if grad is None:
            return tf.identity(known)
        new = tf.convert_to_tensor(tf.cast(grad, known.dtype))
        return tf.where(self._opens, new, scaler.gradients.largest(tf.stack([known, new])))

    def _check_same_weights(self, grads: list) -> None:
        # A trace fixes which weights the update moves, and sees only one micro-batch of the window.
        now = frozenset(position for position, grad in enumerate(grads) if grad is not None)
        before = self._with_gradient or now
        # If no weight has a gradient, the gate raises.
        for position in sorted(now ^ before) if now else ():
            has, had = ("no gradient", "one") if position in before else ("a gradient", "none")
            raise scaler.InvalidArgument(
                f"TrainStep(accumulate={_shown(self._sizes)}): weight {self._names[position]!r} has {has} in this "
                f"micro-batch, and had {had} in an earlier one: expected the same weights in all, since their sum "
                "makes one step. Add 0.0 * tf.reduce_sum(weight) to the loss for each weight that it leaves out, or "
                "make a TrainStep for each kind of batch."
            )
        self._with_gradient = before

    def _factor(self, loss_scale: tf.Tensor) -> tf.Tensor:
        """The factor that rescales the sums; NaN, which spoils the window, if it is outside of float32's range."""
        factor = loss_scale / self._scale
        # A subnormal factor would flush the sums to zero.
        factor = tf.where(factor >= _SMALLEST_NORMAL, factor, float("nan"))
        # The scale is 0 after a checkpoint without it.
        return tf.where(self._scale > 0.0, factor, 1.0)

    def _take(self, sums: list, may_branch: bool) -> None:
        """Assigns new sums if all of them are finite."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in sums])
        known = tf.where(self._opens, tf.zeros_like(self._broken), self._broken)
        spoils = tf.logical_and(tf.reduce_all(tf.equal(known, 0)), tf.logical_not(finite))

        def broken() -> tf.Tensor:
            return tf.stack(list(map(_kind, sums)))

        found = tf.cond(spoils, broken, lambda: known) if may_branch else tf.where(spoils, broken(), known)
        self._broken.assign(found)
        for total, value in zip(self._sums, sums, strict=True):
            total.assign(tf.where(finite, value, total))


_SMALLEST_NORMAL = 2.0**-126
_INFINITE, _NAN = 1, 2**32
"""What is wrong with a sum: also with a few of them, added up."""
_FIRST, _SUM = tf.VariableAggregation.ONLY_FIRST_REPLICA, tf.VariableAggregation.SUM


def local_variable(value: Any, name: str, aggregation: tf.VariableAggregation = _FIRST) -> tf.Variable:
    """A variable of which each replica has its own value. `aggregation` says what another number of replicas gets."""
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation,
    )


def _kind(value: tf.Tensor) -> tf.Tensor:
    """0 for finite values, `_INFINITE` with an infinity among them, `_NAN` with a NaN."""
    infinite = tf.where(tf.reduce_any(tf.math.is_inf(value)), tf.constant(_INFINITE, tf.int64), 0)
    return tf.where(tf.reduce_any(tf.math.is_nan(value)), tf.constant(_NAN, tf.int64), infinite)


def _plus(
    total: tf.Tensor, factor: tf.Tensor, grad: tf.Tensor | tf.IndexedSlices | None, weight: tf.Tensor | None
) -> tf.Tensor:
    moved = total * tf.cast(factor, total.dtype)
    if grad is None:
        return moved
    # Cast first: the conversion to a dense tensor sums slices of equal index.
    dense = tf.convert_to_tensor(tf.cast(grad, total.dtype))
    # The gradient is of a replica's share of a mean over them. Sums of weighted ones do not depend on their number.
    return moved + (dense if weight is None else dense * tf.cast(weight * replica_count(), total.dtype))


def _at(sizes: tuple[tuple[int, int], ...], applied: tf.Tensor) -> tf.Tensor:
    """The size that holds after so many applied steps, scalar int64."""
    begins, size = zip(*sizes, strict=True)
    place = tf.reduce_sum(tf.cast(applied >= tf.constant(begins, tf.int64), tf.int32)) - 1
    return tf.gather(tf.constant(size, tf.int64), place)


def _shown(sizes: tuple[tuple[int, int], ...]) -> str:
    return str(dict(sizes)) if len(sizes) > 1 else str(sizes[0][1])


def _sum_dtype(weight: Any) -> tf.DType:
    return tf.float64 if tf.as_dtype(weight.dtype) == tf.float64 else tf.float32
