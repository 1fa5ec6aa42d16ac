"""Many small networks on the digits, trained together as one batch of matrices, with explicit rounding.

The backward pass is written out, so each tensor in it can be rounded and inspected. The first axis of every tensor
holds the copies of a network: set-ups times seeds, with the seeds of a set-up next to each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

import scaler
from loops import tasks

SIZES = (64, 64, 32, 10)
BATCH = 64
MOMENTUM = 0.9
RATE = 0.05

Rounding = Callable[[tf.Tensor], tf.Tensor]
State = TypeVar("State")


class Problem(NamedTuple):
    """The digits as vectors.

    Attributes:
        images: Float32 [n, 64].
        labels: Int32 [n].
        test_images: Held-out images.
        test_labels: Held-out labels.
    """

    images: tf.Tensor
    labels: tf.Tensor
    test_images: tf.Tensor
    test_labels: tf.Tensor


class Pass(NamedTuple):
    """The results of one backward pass.

    Attributes:
        loss: Float32 [copies], neither scaled nor multiplied by a factor.
        grads: Scaled gradients of the weights, float32 [copies, ...], in the order of the weights.
        deltas: Scaled gradients of the pre-activations of each layer, float32 [copies, batch, units], first layer
            first.
    """

    loss: tf.Tensor
    grads: list[tf.Tensor]
    deltas: list[tf.Tensor]


class Ends(NamedTuple):
    """For each seed: held-out accuracy and loss, and the share of weights that steps of the second half leave."""

    accuracy: np.ndarray
    loss: np.ndarray
    stayed: np.ndarray


def digits() -> Problem:
    """The digits.

    Raises:
        loops.LoopError: If scikit-learn is not installed.
    """
    task = tasks.load("digits")
    flat = [tf.constant(np.reshape(images, (len(images), -1))) for images in (task.images, task.test_images)]
    return Problem(flat[0], tf.constant(task.labels), flat[1], tf.constant(task.test_labels))


def start(seeds: int, setups: int = 1, sizes: Sequence[int] = SIZES) -> list[tf.Tensor]:
    """Weights and biases in turn, [setups * seeds, in, out] and [setups * seeds, 1, out]; all set-ups begin equal."""
    weights = []
    for layer, (wide, out) in enumerate(itertools.pairwise(sizes)):
        drawn = [
            np.random.default_rng([seed, layer]).normal(0, np.sqrt(2 / wide), (wide, out)) for seed in range(seeds)
        ]
        weights += [
            tf.tile(tf.constant(np.stack(drawn), tf.float32), [setups, 1, 1]),
            tf.zeros([setups * seeds, 1, out]),
        ]
    return weights


def batch(problem: Problem, step: tf.Tensor, seeds: int, setups: int = 1) -> tuple[tf.Tensor, tf.Tensor]:
    """Images [setups * seeds, BATCH, 64] and labels [setups * seeds, BATCH], the same for every set-up of a seed."""
    count = problem.labels.shape[0]
    drawn = tf.random.stateless_uniform([seeds, BATCH], tf.stack([step, 1]), 0, count, tf.int32)
    drawn = tf.tile(drawn, [setups, 1])
    return tf.gather(problem.images, drawn), tf.gather(problem.labels, drawn)


def exact(values: tf.Tensor) -> tf.Tensor:
    """Rounds nothing: float32."""
    return values


def half(values: tf.Tensor) -> tf.Tensor:
    """Rounds to float16, held in float32: values out of range become infinite or zero."""
    return tf.cast(tf.cast(values, tf.float16), tf.float32)


def backward(
    weights: Sequence[tf.Tensor],
    images: tf.Tensor,
    labels: tf.Tensor,
    scale: tf.Tensor,
    forward_rounding: Rounding = half,
    rounding: Rounding = half,
    cut: Callable[[int, tf.Tensor], tf.Tensor] | None = None,
) -> Pass:
    """One pass forward and backward through dense layers with ReLU, summed in float32 and rounded after each product.

    Args:
        weights: Weights and biases in turn, as `start` returns them.
        images: [copies, batch, 64].
        labels: [copies, batch].
        scale: Float32 [copies], the factor on the loss before the backward pass.
        forward_rounding: The rounding of weights, products and activations.
        rounding: The rounding of each gradient.
        cut: Maps a layer's number and the scaled gradient of its product to the gradient that is propagated.
    """
    layers = len(weights) // 2
    kernels = [forward_rounding(kernel) for kernel in weights[0::2]]
    inputs, given = [images], images
    for number in range(layers):
        given = forward_rounding(given @ kernels[number] + forward_rounding(weights[2 * number + 1]))
        if number < layers - 1:
            given = tf.nn.relu(given)
            inputs.append(given)
    size = tf.cast(tf.shape(labels)[1], tf.float32)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, given), axis=1)
    wrong = tf.nn.softmax(given) - tf.one_hot(labels, given.shape[-1])
    delta = rounding(wrong * (scale[:, None, None] / size))
    grads: list[tf.Tensor] = []
    deltas: list[tf.Tensor] = []
    for number in reversed(range(layers)):
        if cut is not None:
            delta = cut(number, delta)
        deltas.insert(0, delta)
        kernel = rounding(tf.matmul(inputs[number], delta, transpose_a=True))
        grads[:0] = [kernel, rounding(tf.reduce_sum(delta, axis=1, keepdims=True))]
        if number:
            # Where ReLU gave zero, the gradient is zero, even for an infinity, which a product would make NaN.
            passed = rounding(tf.matmul(delta, kernels[number], transpose_b=True))
            delta = tf.where(inputs[number] > 0, passed, tf.zeros_like(passed))
    return Pass(loss, grads, deltas)


def over_steps(
    steps: int, start: Callable[[], State], take: Callable[[tf.Tensor, State], tuple[State, tf.Tensor]]
) -> tuple[State, np.ndarray]:
    """The state after all steps of a run, and what each recorded, float32 [steps, ...], in one graph.

    Args:
        steps: The number of steps.
        start: Makes the state before the first.
        take: Of the number of a step and the state before it: the state after it, and the record.
    """

    @tf.function(autograph=True)
    def run() -> tuple:
        state = start()
        rows = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            state, row = take(step, state)
            rows = rows.write(step, row)
        return state, rows.stack()

    # Traced explicitly: TensorFlow warns about functions that calls trace repeatedly, as here in every call.
    state, rows = run.get_concrete_function()()
    return state, rows.numpy()


def largest(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The largest magnitude of each copy, float32 [copies]; infinite if one is not finite."""
    highest = [tf.reduce_max(tf.abs(tensor), axis=[1, 2]) for tensor in tensors]
    found = [all_finite([tensor]) for tensor in tensors]
    return tf.where(tf.reduce_all(tf.stack(found), axis=0), tf.reduce_max(tf.stack(highest), axis=0), float("inf"))


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether each copy's values are finite, bool [copies]."""
    return tf.reduce_all(
        tf.stack([tf.reduce_all(tf.math.is_finite(tensor), axis=[1, 2]) for tensor in tensors]), axis=0
    )


def share(conditions: Sequence[tf.Tensor]) -> tf.Tensor:
    """The share of values that are true, float32 [copies]."""
    so = tf.add_n([tf.reduce_sum(tf.cast(condition, tf.float32), axis=[1, 2]) for condition in conditions])
    return so / float(sum(condition.shape[1] * condition.shape[2] for condition in conditions))


@tf.function(reduce_retracing=True)
def evaluate(weights: Sequence[tf.Tensor], images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Float32 loss and accuracy [copies] of each copy; an example with a non-finite output counts as wrong."""
    given = images[None]
    for number, (kernel, bias) in enumerate(zip(weights[0::2], weights[1::2], strict=True)):
        given = (tf.nn.relu(given) if number else given) @ kernel + bias
    truth = tf.broadcast_to(labels[None], tf.shape(given)[:2])
    right = tf.equal(tf.argmax(given, axis=-1, output_type=tf.int32), truth)
    right = tf.logical_and(right, tf.reduce_all(tf.math.is_finite(given), axis=-1))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(truth, given)
    return tf.reduce_mean(loss, axis=1), tf.reduce_mean(tf.cast(right, tf.float32), axis=1)


def ends_of(problem: Problem, weights: Sequence[tf.Tensor], stayed: np.ndarray) -> Ends:
    """How runs ended with these weights.

    Args:
        problem: The digits.
        weights: As `start` returns them.
        stayed: The share of weights that each step left as they were, [steps, copies].
    """
    loss, accuracy = evaluate(weights, problem.test_images, problem.test_labels)
    late = stayed[len(stayed) // 2 :]
    return Ends(accuracy.numpy(), loss.numpy(), late.sum(axis=0) * np.float32(1 / len(late)))


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
    forward_rounding: Rounding = half,
    rounding: Rounding = half,
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
    problem, copies = digits(), [slice(at * seeds, (at + 1) * seeds) for at in range(setups)]

    def initial() -> tuple:
        weights = start(seeds, setups)
        states = [stacked(strategy.init(), seeds) for strategy in strategies]
        return weights, [tf.zeros_like(weight) for weight in weights], states

    def take(step: tf.Tensor, state: tuple) -> tuple:
        weights, momenta, states = state
        images, labels = batch(problem, step, seeds, setups)
        scale = tf.concat([state.loss_scale for state in states], axis=0)
        seen = backward(weights, images, labels, scale * factor, forward_rounding, rounding)
        # Weights are moved by quotients in float32, which must be finite, too.
        amax, finite = largest(seen.grads), all_finite(seen.grads)
        unscaled, both = amax / scale, largest([*seen.grads, *seen.deltas]) / scale
        flushed, wide = tf.fill(tf.shape(scale), float("nan")), seen
        if twin or shared:
            wide = backward(weights, images, labels, factor, forward_rounding, exact)
            lost = [tf.logical_and(a == 0, b != 0) for a, b in zip(seen.deltas, wide.deltas, strict=True)]
            flushed = share(lost) / share([delta != 0 for delta in wide.deltas])
        states = [
            strategy.update(state, _event(strategy, [grad[own] for grad in seen.grads], finite[own], unscaled[own]))
            for strategy, state, own in zip(strategies, states, copies, strict=True)
        ]
        after = tf.concat([state.loss_scale for state in states], axis=0)
        divisor = tf.where(wrong, after, scale)
        if shared:
            weights, momenta = descend(weights, momenta, wide.grads, factor, tf.ones_like(finite))
        else:
            weights, momenta = descend(weights, momenta, seen.grads, divisor * factor, finite)
        row = [seen.loss, scale, 1.0 - tf.cast(finite, tf.float32), unscaled, both, flushed, divisor / scale]
        return (weights, momenta, states), tf.stack(row)

    (weights, *_), rows = over_steps(steps, initial, take)
    by_step = np.moveaxis(rows.reshape(steps, 7, setups, seeds), 1, 0)
    ends = evaluate(weights, problem.test_images, problem.test_labels)
    seen = TrainingCurves(*by_step, *(value.numpy().reshape(setups, seeds) for value in ends))
    return seen._replace(skipped=seen.skipped > 0)


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


def _event(strategy: scaler.Strategy, grads: Sequence[tf.Tensor], finite: tf.Tensor, amax: tf.Tensor) -> scaler.Event:
    """The event of a strategy, of the gradients of its copies."""
    needs = getattr(strategy, "needs", scaler.strategies.Needs())
    return scaler.Event(finite, amax if needs.amax else None, _histogram(grads, needs.edges) if needs.edges else None)


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
