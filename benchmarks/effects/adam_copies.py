"""Many small networks on the digits, each with an Adam of its own: its rates, its epsilon and what it clips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from benchmarks.effects import networks

BETA_1 = 0.9
DECAY = 0.01
CLIP_NORM = 1.0
PLAIN, CLIPPED, STABLE = ("AdamW", "clipped", "StableAdamW")


class Setup(NamedTuple):
    """One optimizer.

    Attributes:
        rate: The learning rate.
        beta_2: The share of the second moment that a step keeps.
        epsilon: What is added to the root of the second moment.
        way: `PLAIN`, `CLIPPED` or `STABLE`.
        decay: The share of the weights that a step takes off, over the learning rate.
        limit: What the global norm of clipped gradients is at most.
    """

    rate: float
    beta_2: float
    epsilon: float = 1e-8
    way: str = PLAIN
    decay: float = DECAY
    limit: float = CLIP_NORM


class Moments(NamedTuple):
    """The moments of one weight of all copies, unbiased, float32 in the shape of the weight."""

    first: tf.Tensor
    second: tf.Tensor


class Curves(NamedTuple):
    """Records of each step, float32 [steps, setups, seeds].

    Attributes:
        loss: The loss on the held-out digits, before the step.
        rms: The root of the mean of g^2 / u over the first layer's kernel, u the second moment that has g in it.
        norm: The global norm of all gradients, before they are clipped.
        grad: The root mean square of that kernel's gradient.
        update: The root mean square of its update, without learning rate, decay and what is clipped off.
    """

    loss: np.ndarray
    rms: np.ndarray
    norm: np.ndarray
    grad: np.ndarray
    update: np.ndarray


def train(setups: Sequence[Setup], *, seeds: int, factors: Sequence[float]) -> Curves:
    """Trains a network for each optimizer and seed; all optimizers of a seed see the same batches.

    Args:
        setups: The optimizers.
        seeds: The number of networks for each.
        factors: What the loss of each step is multiplied by: as many steps are taken.
    """
    problem, steps, count = networks.digits(), len(factors), len(setups)
    each = Setup(*(np.repeat(values, seeds) for values in zip(*setups, strict=True)))

    factor = tf.constant(factors, tf.float32)

    def start() -> tuple:
        weights = networks.start(seeds, count)
        return weights, at_rest(weights)

    def take(step: tf.Tensor, state: tuple) -> tuple:
        weights, moments = state
        loss, _ = networks.evaluate(weights, problem.test_images, problem.test_labels)
        images, labels = networks.batch(problem, step, seeds, count)
        scale = tf.fill([count * seeds], factor[step])
        grads = networks.backward(weights, images, labels, scale, networks.exact, networks.exact).grads
        weights, moments, rms, update = stepped(weights, moments, grads, tf.cast(step, tf.float32) + 1, each)
        row = [loss, rms[0], _norm(grads), root_mean(tf.square(grads[0])), update[0]]
        return (weights, moments), tf.stack(row)

    rows = networks.over_steps(steps, start, take)[1]
    return Curves(*np.moveaxis(rows.reshape(steps, len(Curves._fields), count, seeds), 1, 0))


def at_rest(weights: Sequence[tf.Tensor]) -> list[Moments]:
    """The moments before the first step."""
    return [Moments(tf.zeros_like(weight), tf.zeros_like(weight)) for weight in weights]


def stepped(
    weights: Sequence[tf.Tensor],
    moments: Sequence[Moments],
    grads: Sequence[tf.Tensor],
    step: tf.Tensor,
    each: Setup,
    share: tf.Tensor | float = 1.0,
) -> tuple[list[tf.Tensor], list[Moments], list[tf.Tensor], list[tf.Tensor]]:
    """One step of AdamW for each copy, of which some clip gradients by their norm and some updates, by StableAdamW.

    As in the authors' own code of StableAdamW, the moments are corrected where they are averaged, and the decay is not
    clipped: Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models",
    arXiv:2304.13013.

    Args:
        weights: [copies, ...].
        moments: Of each weight.
        grads: Of each weight.
        step: Scalar float32, from 1 on.
        each: The optimizers, with arrays [copies] in place of the values.
        share: Scalar float32, a factor on the learning rates.

    Returns:
        The weights and moments after the step, and for each weight the root of the mean of g^2 / u and the root mean
        square of the update v / (sqrt(u) + epsilon), both [copies].
    """
    clipped = np.array([way == CLIPPED for way in each.way])
    limit = np.asarray(each.limit, np.float32)
    factor = tf.where(clipped, tf.minimum(1.0, limit / tf.maximum(_norm(grads), limit / 1e6)), 1.0)
    stable = np.array([way == STABLE for way in each.way])
    rate, epsilon, decay = (_of_copies(values) for values in (each.rate, each.epsilon, each.decay))
    keep_1, keep_2 = (_kept(_of_copies(beta), step) for beta in (np.full(np.shape(each.rate), BETA_1), each.beta_2))
    moved, kept, ratios, updates = [], [], [], []
    for weight, moment, whole in zip(weights, moments, grads, strict=True):
        grad = whole * factor[:, None, None]
        first = keep_1 * moment.first + (1 - keep_1) * grad
        second = keep_2 * moment.second + (1 - keep_2) * tf.square(grad)
        update = first / (tf.sqrt(second) + epsilon)
        ratio = root_mean(tf.square(grad) / tf.maximum(second, tf.square(epsilon)))
        slower = tf.where(stable, tf.maximum(1.0, ratio), 1.0)[:, None, None]
        moved.append(weight * (1 - share * rate * decay) - share * rate / slower * update)
        kept.append(Moments(first, second))
        ratios.append(ratio)
        updates.append(root_mean(tf.square(update)))
    return moved, kept, ratios, updates


def root_mean(squares: tf.Tensor) -> tf.Tensor:
    """The root of the mean of each copy, [copies]."""
    return tf.sqrt(tf.reduce_mean(squares, axis=[1, 2]))


def _norm(grads: Sequence[tf.Tensor]) -> tf.Tensor:
    """The global norm of the gradients of each copy, [copies]."""
    return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(grad), axis=[1, 2]) for grad in grads]))


def _of_copies(values: np.ndarray | float) -> tf.Tensor:
    return tf.constant(np.asarray(values, np.float32)[:, None, None])


def _kept(beta: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """The share that an average keeps at a step, so that it is that of a corrected one."""
    return beta * (1 - beta ** (step - 1)) / (1 - beta**step)
