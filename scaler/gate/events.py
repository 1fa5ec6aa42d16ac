"""What a strategy is told of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.gradients import statistics
from scaler.strategies import Event
from scaler.strategies.base import Needs


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
        amax = replicas.of_each(strategy, replicas.each(strategy, statistics.amax, summed))[0] / loss_scale
    if needs.edges:
        counted = replicas.each(strategy, lambda grads: statistics.histogram(grads, needs.edges), own)
        counts = replicas.of_each(strategy, replicas.total(strategy, [counted])[0])[0]
    return Event(applied, *statistics.Statistics(amax, counts), norm if needs.norm else None, loss, norms)
