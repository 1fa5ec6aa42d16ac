"""A small transformer on text, traced once and trained from any seed at any learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import runs
from benchmarks.effects.runs import Traced
from loops.tasks.text import ALPHABET, TextTask

CONTEXT, WIDTH, BLOCKS, BATCH = 32, 32, 2, 16
RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""The upper five of the seven learning rates of the paper."""
WARM = 0.05
"""The share of the steps in which the learning rate rises."""
_HELD_OUT = 128
_LAST_RATE = 1e-5
_CLIP = 1.0
_Z, _DECAY = 1e-4, 1e-4
"""The coefficient of log^2 Z in the loss, and the share of the weights that a step at the highest rate takes off."""


class Course(NamedTuple):
    """One run.

    Attributes:
        logit: Float32 [steps, blocks], the largest magnitude of an attention logit.
        entropy: Float32 [steps, blocks], how evenly heads attend, in nats.
        first: The held-out loss before the first step, nats per character.
        end: The same at the end; not finite if the outputs are not.
    """

    logit: np.ndarray
    entropy: np.ndarray
    first: float
    end: float


class SmallTransformer(Traced):
    """A `TrainStep` of two blocks, with Adam, clipping, warm-up and decay of the learning rate as in the paper.

    Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training instabilities", arXiv:2309.14322,
    section 2.1.

    Args:
        normalizes: Whether queries and keys are normalized (qk-layernorm).
        steps: The steps of each run.
    """

    def __init__(self, normalizes: bool, steps: int):
        self._task, self._steps = text(), steps
        self._attend = NormalizedAttention if normalizes else None
        model = self._new_model()
        # Adam's own argument would multiply the decay by the learning rate, and it is fixed by a trace.
        optimizer = keras.optimizers.Adam(1e-3, beta_1=0.9, beta_2=0.95, epsilon=1e-8)
        watch = scaler.observe.watch(model, kinds=["attention"])
        super().__init__(model, self._loss, optimizer, scaler.NoScaling(), clip_norm=_CLIP, probes=watch)
        self._characters = tf.constant(self._task.characters)
        self._held_out = held_out(self._task)
        self._train = tf.function(self._trained, autograph=True)
        self._evaluate = tf.function(self._evaluated)
        self._starts: dict[int, list[np.ndarray]] = {}

    def run(self, rate: float, seed: int) -> Course:
        """Trains from new weights.

        Args:
            rate: The highest learning rate.
            seed: Determines the initial weights and the batches.
        """
        given = tf.constant(rate, tf.float32), tf.constant(seed)
        self.begin(self._train, *given)
        if seed not in self._starts:
            keras.utils.set_random_seed(seed)
            self._starts[seed] = self._new_model().get_weights()
        self.model.set_weights(self._starts[seed])
        first = float(self._evaluate())
        rows = self._train(*given).numpy()
        return Course(rows[:, 0], rows[:, 1], first, float(self._evaluate()))

    def _new_model(self) -> keras.Model:
        return self._task.model("float32", self._attend)

    def _loss(self, following: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        log_z = tf.reduce_logsumexp(logits, axis=-1)
        return self._task.loss(following, logits) + _Z * tf.reduce_mean(tf.square(log_z))

    def _trained(self, rate: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """All steps of a run, float32 [steps, 2, blocks]: logits and entropies."""
        rows = tf.TensorArray(tf.float32, self._steps, element_shape=[2, BLOCKS])
        for number in tf.range(self._steps):
            share = share_of_rate(number, self._steps)
            self.optimizer.learning_rate.assign(tf.maximum(share * rate, _LAST_RATE))
            starts = tf.random.stateless_uniform(
                [BATCH], tf.stack([number, seed]), 0, self._characters.shape[0] - CONTEXT, tf.int32
            )
            out = self.step(_windows(self._characters, starts))
            for variable in self.model.trainable_variables:
                variable.assign_sub(share * _DECAY * variable)
            rows = rows.write(number, tf.stack([out["attention_logit"], out["attention_entropy"]]))
        return rows.stack()

    def _evaluated(self) -> tf.Tensor:
        inputs, following = self._held_out
        return self._task.loss(following, self.model(inputs))


class NormalizedAttention(keras.layers.MultiHeadAttention):
    """Attention whose queries and keys go through a LayerNorm in each head, with one gain for all heads.

    Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", arXiv:2302.05442.
    """

    def build(self, query_shape: tuple, value_shape: tuple, key_shape: tuple | None = None) -> None:
        """Builds the projections, and normalizes what two of them give."""
        super().build(query_shape, value_shape, key_shape)
        for name, projection in (("query_norm", self.query_dense), ("key_norm", self.key_dense)):
            norm = keras.layers.LayerNormalization(center=False, epsilon=1e-6, dtype=self.dtype_policy, name=name)
            norm.build((None, None, self.num_heads, self.key_dim))
            setattr(self, name, norm)
            # A function, not the layer: the projection is built, and Keras adds no layer to one that is.
            projection.activation = norm.__call__


def text() -> TextTask:
    """Python's own source as the small transformer reads it."""
    return runs.text(context=CONTEXT, width=WIDTH, blocks=BLOCKS)


def held_out(task: TextTask) -> tuple[tf.Tensor, tf.Tensor]:
    """The examples of held-out losses and what follows each character of them, both int32 [examples, context]."""
    places = np.linspace(0, len(task.test_characters) - CONTEXT - 1, _HELD_OUT).astype(np.int32)
    return _windows(tf.constant(task.test_characters), tf.constant(places))


def share_of_rate(step: tf.Tensor, steps: int) -> tf.Tensor:
    """The learning rate of a step over the highest one, float32: it rises linearly, then falls as a cosine."""
    warm = max(1.0, WARM * steps)
    done = tf.cast(step, tf.float32) + 1
    falling = 0.5 * (1 + tf.cos(np.pi * (done - warm) / max(steps - warm, 1.0)))
    return tf.where(done < warm, done / warm, falling)


def frequency_loss(task: TextTask) -> float:
    """The held-out loss of one who knows how frequent each character is, and no more; nats per character."""
    counts = np.bincount(task.characters, minlength=len(ALPHABET)) + 1.0
    return float(-np.log(counts / counts.sum())[task.test_characters].mean())


def sensitivity(ends: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The paper's sensitivity to the learning rate: the mean over rates of min(loss, first loss) - best loss, [seeds].

    Args:
        ends: Held-out losses [rates, seeds]; what is not finite counts as the first loss.
        first: The losses before the first step, [seeds].
    """
    bounded = np.fmin(np.where(np.isfinite(ends), ends, np.inf), first)
    return bounded.mean(axis=0) - bounded.min(axis=0)


def field(courses: Sequence[Sequence[Course]], name: str) -> np.ndarray:
    """An attribute of runs [rates][seeds] as an array [rates, seeds, ...]."""
    return np.array([[getattr(course, name) for course in row] for row in courses])


def _windows(characters: tf.Tensor, starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Examples that begin there and what follows each character of them, both int32 [examples, context]."""
    found = tf.cast(tf.gather(characters, starts[:, None] + tf.range(CONTEXT + 1)), tf.int32)
    return found[:, :-1], found[:, 1:]
