"""Trains under several strategies at once, in one graph, and records scales, skips and flushed shares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks

MOMENTUM = 0.9
RATE = 0.05


class TrainingCurves(NamedTuple):
    """Records of each step. Arrays are [steps, setups, seeds].

    Attributes:
        loss: The loss of the batch.
        scale: Float32, the loss scale of the step.
        skipped: Bool, whether the step was skipped.
        amax: The largest magnitude of the unscaled gradients of weights; infinite in a skipped step.
        largest: The largest magnitude in the whole backward pass, including gradients of activations.
        flushed: The share of the gradients of activations that are zero in float16 but not in a float32 pass at the
            same weights, without zeros of ReLU; NaN unless requested.
        divisor: The divisor of the scaled gradients, relative to the scale of the step.
        test_loss: [setups, seeds], the final loss on the held-out digits, in float32.
        accuracy: [setups, seeds], the final accuracy on the held-out digits.
    """

    loss: np.ndarray
    scale: np.ndarray
    skipped: np.ndarray
    amax: np.ndarray
    largest: np.ndarray
    flushed: np.ndarray
    divisor: np.ndarray
    test_loss: np.ndarray
    accuracy: np.ndarray


def train(
    strategies: Sequence[scaler.Strategy],
    *,
    seeds: int,
    steps: int,
    factors: Sequence[float] | None = None,
    updated: Sequence[bool] | None = None,
    forward_rounding: networks.Rounding = networks.half,
    rounding: networks.Rounding = networks.half,
    twin: bool = False,
    shared: bool = False,
) -> TrainingCurves:
    """Trains a network for each strategy and seed by SGD with momentum on float32 weights.

    Args:
        strategies: The strategy of each set-up.
        seeds: The number of networks for each strategy; they differ in initial weights and batches.
        steps: The number of batches.
        factors: A factor on the loss of each set-up, which its step divides out again (default: ones).
        updated: For each set-up, whether it unscales, wrongly, by the scale after the strategy's update (default: no).
        forward_rounding: The rounding of weights and activations.
        rounding: The rounding of gradients.
        twin: Whether to run a float32 backward pass as well, to count what was flushed.
        shared: Whether the twin's float32 gradients move the weights at every step, so that all set-ups of a seed see
            the same weights, as on one recorded trace.
    """
    setups = len(strategies)
    ones = tf.ones([setups, seeds])
    factor = tf.reshape(ones * tf.constant(factors or [1.0] * setups, tf.float32)[:, None], [-1])
    wrong = tf.reshape((ones * tf.constant(updated or [False] * setups, tf.float32)[:, None]) > 0, [-1])
    problem = networks.digits()

    def start() -> tuple:
        weights = networks.start(seeds, setups)
        states = [stacked(strategy.init(), seeds) for strategy in strategies]
        return weights, [tf.zeros_like(weight) for weight in weights], states

    def take(step: tf.Tensor, state: tuple) -> tuple:
        weights, momenta, states = state
        images, labels = networks.batch(problem, step, seeds, setups)
        scale = tf.concat([state.loss_scale for state in states], axis=0)
        seen = networks.backward(weights, images, labels, scale * factor, forward_rounding, rounding)
        # Weights are moved by quotients in float32, which must be finite, too.
        amax, finite = networks.largest(seen.grads), networks.all_finite(seen.grads)
        unscaled, both = amax / scale, networks.largest([*seen.grads, *seen.deltas]) / scale
        flushed, wide = tf.fill(tf.shape(scale), float("nan")), seen
        if twin or shared:
            wide = networks.backward(weights, images, labels, factor, forward_rounding, networks.exact)
            lost = [tf.logical_and(a == 0, b != 0) for a, b in zip(seen.deltas, wide.deltas, strict=True)]
            flushed = networks.share(lost) / networks.share([delta != 0 for delta in wide.deltas])
        states = [
            strategy.update(state, _event(strategy, number, seeds, seen.grads, finite, unscaled))
            for number, (strategy, state) in enumerate(zip(strategies, states, strict=True))
        ]
        after = tf.concat([state.loss_scale for state in states], axis=0)
        divisor = tf.where(wrong, after, scale)
        if shared:
            weights, momenta = descend(weights, momenta, wide.grads, factor, tf.ones_like(finite))
        else:
            weights, momenta = descend(weights, momenta, seen.grads, divisor * factor, finite)
        row = [seen.loss, scale, 1.0 - tf.cast(finite, tf.float32), unscaled, both, flushed, divisor / scale]
        return (weights, momenta, states), tf.stack(row)

    (weights, *_), rows = networks.over_steps(steps, start, take)
    loss, scale, skipped, amax, largest, flushed, divisor = np.moveaxis(rows.reshape(steps, 7, setups, seeds), 1, 0)
    test_loss, accuracy = networks.evaluate(weights, problem.test_images, problem.test_labels)
    ends = [value.numpy().reshape(setups, seeds) for value in (test_loss, accuracy)]
    return TrainingCurves(loss, scale, skipped > 0, amax, largest, flushed, divisor, *ends)


def descend(
    weights: Sequence[tf.Tensor],
    momenta: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    divisor: tf.Tensor,
    finite: tf.Tensor,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """One step of SGD with momentum in float32, for the copies whose gradients are finite."""
    moved, kept = [], []
    for weight, momentum, grad in zip(weights, momenta, grads, strict=True):
        applied = tf.broadcast_to(finite[:, None, None], tf.shape(weight))
        new = tf.where(applied, MOMENTUM * momentum + grad / divisor[:, None, None], momentum)
        kept.append(new)
        moved.append(tf.where(applied, weight - RATE * new, weight))
    return moved, kept


def _event(
    strategy: scaler.Strategy,
    number: int,
    seeds: int,
    grads: Sequence[tf.Tensor],
    finite: tf.Tensor,
    amax: tf.Tensor,
) -> scaler.Event:
    """The event of a strategy: the gradients of its set-up's seeds."""
    own = slice(number * seeds, (number + 1) * seeds)
    needs = getattr(strategy, "needs", scaler.strategies.Needs())
    counts = _histogram([grad[own] for grad in grads], needs.edges) if needs.edges else None
    return scaler.Event(finite[own], amax[own] if needs.amax else None, counts)


def _histogram(grads: Sequence[tf.Tensor], edges: Sequence[float]) -> tf.Tensor:
    """Counts of each copy, int64 [edges + 1, copies], as `scaler.gradients.histogram` counts them for one."""
    above = [
        tf.add_n([tf.math.count_nonzero(tf.logical_not(tf.abs(grad) <= edge), axis=[1, 2]) for grad in grads])
        for edge in edges
    ]
    total = tf.zeros_like(above[0]) + sum(grad.shape[1] * grad.shape[2] for grad in grads)
    reached = [total, *above, tf.zeros_like(total)]
    return tf.stack([more - less for more, less in itertools.pairwise(reached)])


def stacked(state: Any, seeds: int) -> Any:
    """The same state of a strategy for each seed, on a last axis."""
    return tf.nest.map_structure(lambda value: tf.repeat(tf.convert_to_tensor(value)[..., None], seeds, axis=-1), state)
