"""Many small networks on the digits, trained together as one batch of matrices, with explicit rounding.

The backward pass is written out, so each tensor in it can be rounded and inspected. The first axis of every tensor
holds the copies of a network: set-ups times seeds, with the seeds of a set-up next to each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from loops import tasks

SIZES = (64, 64, 32, 10)
BATCH = 64

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
    flat = [tf.constant(np.reshape(images, (len(images), -1))) for images in (task.images, task.test_images)]  # type: ignore[union-attr]
    return Problem(flat[0], tf.constant(task.labels), flat[1], tf.constant(task.test_labels))  # type: ignore[union-attr]


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
