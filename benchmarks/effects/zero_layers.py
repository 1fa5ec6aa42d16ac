"""Transformers without any layer: each predicts the next character from one alone. Many are trained at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from benchmarks.effects import networks
from benchmarks.effects.adam_copies import Setup, at_rest, stepped
from benchmarks.effects.small_transformer import share_of_rate, text
from loops.tasks.text import ALPHABET

WIDTH, BATCH = 16, 32
_EVERY = 50
"""The steps between two records."""


class Runs(NamedTuple):
    """What some networks did.

    Attributes:
        log_z: Float32 [records, setups, seeds], the mean over a batch of log Z, Z the sum of the logits' exponentials.
        logit: The mean output logit, likewise.
        first: [setups, seeds], the held-out loss before the first step, nats per character.
        end: The same at the end.
        rounded: The same at the end, if output logits are rounded to bfloat16.
    """

    log_z: np.ndarray
    logit: np.ndarray
    first: np.ndarray
    end: np.ndarray
    rounded: np.ndarray


def train(
    setups: Sequence[Setup],
    coefficients: Sequence[float],
    *,
    seeds: int,
    steps: int,
    held_out: np.ndarray | None = None,
) -> Runs:
    """Trains an embedding, a LayerNorm and a head without biases for each set-up and seed.

    Args:
        setups: The optimizers; the learning rate rises and falls as `share_of_rate` says.
        coefficients: What log^2 Z is multiplied by in the loss of each set-up.
        seeds: The number of networks for each; all set-ups of a seed see the same batches.
        steps: The steps of each run.
        held_out: What `pairs_of` returns for the characters of the held-out losses; None takes all of the text.
    """
    task, count = text(), len(setups)
    each = Setup(*(np.repeat(values, seeds) for values in zip(*setups, strict=True)))  # type: ignore[arg-type]
    z = tf.constant(np.repeat(coefficients, seeds), tf.float32)
    characters = tf.constant(task.characters)
    if held_out is None:
        held_out = pairs_of(task.test_characters[:-1], task.test_characters[1:])

    def start() -> tuple:
        weights = _start(seeds, count)
        return weights, at_rest(weights)

    def take(step: tf.Tensor, state: tuple) -> tuple:
        weights, moments = state
        starts = tf.random.stateless_uniform([seeds, BATCH], tf.stack([step, 1]), 0, characters.shape[0] - 1, tf.int32)
        given, following = (
            tf.tile(tf.one_hot(tf.gather(characters, places), len(ALPHABET)), [count, 1, 1])
            for places in (starts, starts + 1)
        )
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits = logits_of(weights, given)
            log_z = tf.reduce_logsumexp(logits, axis=-1)
            wrong = tf.reduce_mean(log_z - tf.reduce_sum(logits * following, axis=-1), axis=1)
            loss = tf.reduce_sum(wrong + z * tf.reduce_mean(tf.square(log_z), axis=1))
        grads = tape.gradient(loss, weights)
        number, share = tf.cast(step, tf.float32) + 1, share_of_rate(step, steps)
        weights, moments, _, _ = stepped(weights, moments, grads, number, each, share)
        return (weights, moments), tf.stack([tf.reduce_mean(log_z, axis=1), tf.reduce_mean(logits, axis=[1, 2])])

    (weights, _), rows = networks.over_steps(steps, start, take)
    every = min(_EVERY, steps)
    log_z, logit = np.moveaxis(rows[every - 1 :: every].reshape(-1, 2, count, seeds), 1, 0)
    first, end, rounded = (
        values.numpy().reshape(count, seeds)
        for values in (_held_out(_start(seeds, count), held_out)[0], *_held_out(weights, held_out))
    )
    return Runs(log_z, logit, first, end, rounded)


def logits_of(weights: Sequence[tf.Tensor], given: tf.Tensor) -> tf.Tensor:
    """Output logits [copies, examples, characters] after characters in one-hot form, of the same shape."""
    embedding, gain, head = weights
    x = given @ embedding
    centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
    deviation = tf.sqrt(tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True) + 1e-6)
    return (centred / deviation * gain) @ head


def _start(seeds: int, count: int) -> list[tf.Tensor]:
    """Embedding, gain and head; plain normal with a deviation of 1 / sqrt(width)."""
    size, deviation = len(ALPHABET), 1 / np.sqrt(WIDTH)
    drawn = [np.random.default_rng(seed).normal(0, deviation, (2, size, WIDTH)) for seed in range(seeds)]
    embedding, head = np.tile(np.stack(drawn, axis=1), [1, count, 1, 1]).astype(np.float32)
    gain = tf.ones([count * seeds, 1, WIDTH])
    return [tf.constant(embedding), gain, tf.constant(np.swapaxes(head, 1, 2))]


def pairs_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How often each character follows each, as a share of all, float32 [before, after]."""
    counts = np.zeros([len(ALPHABET)] * 2)
    np.add.at(counts, (before, after), 1)
    return (counts / counts.sum()).astype(np.float32)


@tf.function(reduce_retracing=True)
def _held_out(weights: Sequence[tf.Tensor], pairs: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
    """The exact loss over the held-out text, as it is and with logits in bfloat16, [copies] each."""
    copies, size = weights[0].shape[0], len(ALPHABET)
    logits = logits_of(weights, tf.eye(size, batch_shape=[copies]))
    narrow = tf.cast(tf.cast(logits, tf.bfloat16), tf.float32)
    plain, rounded = (-tf.reduce_sum(pairs * tf.nn.log_softmax(each), axis=[1, 2]) for each in (logits, narrow))
    return plain, rounded
