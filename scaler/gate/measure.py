"""The first part of a step: gradients of all replicas become sums and norms, which decide, clip and tell a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.graphs import in_xla
from scaler.gate.joined import Joined
from scaler.gate.proofs import SMALL
from scaler.gate.targets import Targets
from scaler.gradients import statistics
from scaler.gradients.statistics import squared_norms
from scaler.strategies import Event
from scaler.strategies.base import Needs


class Measured(NamedTuple):
    """The gradients of a step and their size.

    Attributes:
        own: Scaled gradients as each replica has them, in float32 or float64 if there are several.
        given: What the optimizers are to be given, on every replica. It is still to be divided by `divisor`.
        summed: Scaled gradients, summed over the replicas and without duplicate indices.
        sums: The same, divided as far as `given` is.
        divisor: Scalar float32: 1 if the gradients were unscaled first, else the loss scale.
        joined: `sums` side by side.
        squared_norm: The squared global norm of the unscaled gradients, on every replica.
        squares: Float32 or float64 [m], what adds up to it; one for each gradient where one of them is clipped alone.
        each: The squared norm of each gradient, [n]. None where only a skip needs them.
        norm: Float32, the global norm.
    """

    own: list
    given: list
    summed: list
    sums: list
    divisor: tf.Tensor
    joined: Joined
    squared_norm: Any
    squares: tf.Tensor
    each: tf.Tensor | None
    norm: tf.Tensor

    def of_each(self, strategy: Any, targets: Targets) -> tf.Tensor:
        """The squared norm of each gradient, [n], measured now if it was not before."""
        if self.each is not None:
            return self.each
        return targets.squared_norms(_first(strategy, self.sums), self.divisor, may_branch=False)


def to_be_summed(targets: Targets, grads: list) -> list:
    """In float32 or float64. Of a new value the sum over the replicas holds that of each, [replicas, ...]."""
    pairs = zip(gradients.widened(grads), targets.updated, targets.takes_derivative, strict=True)
    return [
        grad if derivative else replicas.one_hot_by_replica(tf.reshape(tf.convert_to_tensor(grad), variable.shape))
        for grad, variable, derivative in pairs
    ]


def measure(
    strategy: Any,
    targets: Targets,
    grads: list,
    loss_scale: tf.Tensor,
    *,
    sum_duplicates: bool,
    selects: bool,
    by_tensor: bool,
) -> Measured:
    """Sums gradients over the replicas and measures them. Called once for all replicas.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        targets: What the step moves.
        grads: Scaled gradients on every replica.
        loss_scale: Scalar float32, what they are scaled by.
        sum_duplicates: Whether the optimizer is given the sum of an index's duplicates, or each by itself.
        selects: Whether the step selects its new values. It then knows why it skips by the norm of each.
        by_tensor: Whether somebody asks for the norm of each at every step.
    """
    totals = _sums(strategy, targets, grads)
    summed = replicas.map_replicas(strategy, gradients.sum_duplicates, totals)
    # What follows divides by 1, which takes no operation.
    divisor, sums, joined = loss_scale, summed, Joined(strategy, summed)
    if sum_duplicates and _worth_unscaling_first(targets, joined, loss_scale):
        divisor, sums = tf.constant(1.0), replicas.map_replicas(strategy, _unscaled, summed, loss_scale)
        joined = Joined(strategy, sums)
    given = sums if sum_duplicates else totals
    alike = not by_tensor and len(targets.parts) == 1 and all(targets.takes_derivative)
    clip = targets.parts[0].clip
    # A gradient that has a limit of its own needs a norm of its own.
    together = joined.places() if alike and (clip is None or clip.limits_all_alike) else []
    if together:
        squares = _of_groups(strategy, sums, joined, together, divisor, selects)
        of_each = targets.squared_norms(_first(strategy, sums), divisor, may_branch=False) if selects else None
    else:
        squares = replicas.map_replicas(strategy, targets.squared_norms, sums, divisor, not selects)
        of_each = replicas.local_values(strategy, squares)[0]
    squared_norm = replicas.map_replicas(strategy, tf.reduce_sum, squares)
    norm = tf.cast(tf.sqrt(replicas.local_values(strategy, squared_norm)[0]), tf.float32)
    first = replicas.local_values(strategy, squares)[0]
    return Measured(grads, given, summed, sums, divisor, joined, squared_norm, first, of_each, norm)


def _sums(strategy: Any, targets: Targets, grads: list) -> list:
    """What all replicas have together: the sums of derivatives, and the largest new values."""
    totals = replicas.total(strategy, grads)
    if strategy.num_replicas_in_sync == 1:
        return totals
    return [
        total if derivative else replicas.map_replicas(strategy, gradients.largest, total)
        for total, derivative in zip(totals, targets.takes_derivative, strict=True)
    ]


def _worth_unscaling_first(targets: Targets, joined: Joined, loss_scale: tf.Tensor) -> bool:
    """Whether gradients are so small that they are unscaled before they are measured, and not as each is applied.

    The norm of scaled gradients needs no unscaled copies, which take memory, but a dozen operations to be sure that it
    is exact. Beside small gradients these take longer than the division. Gradients that are joined are divided later,
    by one operation for many.
    """
    if in_xla() or gradients.is_one(loss_scale) or not all(targets.takes_derivative):
        return False  # XLA fuses the division into what follows.
    size = joined.size
    return size is not None and size <= SMALL and not joined.places()


def _unscaled(grads: Sequence, loss_scale: tf.Tensor) -> list[gradients.Gradient]:
    """All gradients, divided by the loss scale, in a graph that TensorFlow may rewrite."""
    return gradients.opaque(gradients.divide(grads, loss_scale))


def _of_groups(
    strategy: Any,
    grads: Sequence,
    joined: Joined,
    groups: Sequence[tuple[int, ...]],
    loss_scale: tf.Tensor,
    selects: bool,
) -> Any:
    """Squared norms of small gradients together: an operation for each takes longer than the sum."""
    in_groups = {place for places in groups for place in places}
    rest = [grad for place, grad in enumerate(grads) if place not in in_groups]
    return replicas.map_replicas(strategy, squared_norms, [*map(joined.at, groups), *rest], loss_scale, not selects)


def _first(strategy: Any, grads: Sequence) -> list:
    return [replicas.local_values(strategy, grad)[0] for grad in grads]


def event_of(
    strategy: Any,
    needs: Needs,
    applied: tf.Tensor,
    own: Sequence,
    summed: Sequence,
    loss_scale: tf.Tensor,
    norm: tf.Tensor | None,
    loss: tf.Tensor | None,
    norms: tf.Tensor | None = None,
) -> Event:
    """The event of one step, with the statistics that the strategy needs.

    Args:
        strategy: TensorFlow's, whose replicas each have their own values, from what `replicas.merge` calls.
        needs: What the strategy needs.
        applied: Scalar bool.
        own: Scaled gradients of each replica.
        summed: Their sums over the replicas, without duplicate indices.
        loss_scale: Scalar float32, what they are scaled by.
        norm: Scalar float32, the global norm of the unscaled gradients; None if it is not needed.
        loss: Scalar float32, of all replicas; None if it is not needed.
        norms: Float32 [variables], the norm of each unscaled gradient; None if they are not needed.
    """
    amax = counts = None
    if needs.amax:
        # Rounding keeps the order: the largest divided is the largest of those divided.
        amax = replicas.local_values(strategy, replicas.map_replicas(strategy, statistics.amax, summed))[0] / loss_scale
    if needs.edges:
        counted = replicas.map_replicas(strategy, lambda grads: statistics.histogram(grads, needs.edges), own)
        counts = replicas.local_values(strategy, replicas.total(strategy, [counted])[0])[0]
    return Event(applied, amax, counts, norm if needs.norm else None, loss, norms)
