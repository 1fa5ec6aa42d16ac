"""The log-probabilities of a text by a small transformer, from graphs that compute the same in other ways."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

LogProbabilities = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of characters, int32 [batch, length], and the following ones: float32 [batch, length], in nats."""


def whole(model: keras.Model, *, xla: bool) -> LogProbabilities:
    """All positions at once, with a causal mask.

    Args:
        model: That of `loops.tasks.load("text")`.
        xla: Whether XLA compiles it.
    """
    # Traced explicitly: TensorFlow warns about functions that calls trace repeatedly.
    compiled = tf.function(lambda given: model(given, training=False), jit_compile=xla).get_concrete_function(
        tf.TensorSpec([None, model.input_shape[1]], tf.int32)
    )
    return lambda given, following: _chosen(compiled(tf.constant(given)), following)


def one_by_one(model: keras.Model) -> LogProbabilities:
    """A position after the other, as text is generated: each attends to the ones before, which are kept.

    Args:
        model: As in `whole`.
    """

    def logits(given: np.ndarray) -> tf.Tensor:
        step = _Step(model)
        tokens = tf.constant(given)
        return tf.concat([step(tokens[:, at : at + 1], at) for at in range(given.shape[1])], axis=1)

    return lambda given, following: _chosen(logits(given), following)


class _Step:
    """The layers of the model, applied to one position at a time; only attention looks at others."""

    def __init__(self, model: keras.Model):
        _, self._embedding, self._positions, *rest = model.layers
        kinds = keras.layers.LayerNormalization, keras.layers.MultiHeadAttention, keras.layers.Dense
        self._norms, self._attentions, self._dense = (
            [layer for layer in rest if isinstance(layer, kind)] for kind in kinds
        )
        self._kept: list[list[tf.Tensor]] = [[] for _ in self._attentions]

    def __call__(self, tokens: tf.Tensor, at: int) -> tf.Tensor:
        """Float32 logits [batch, 1, alphabet] for the characters [batch, 1] at a position."""
        x = self._embedding(tokens)
        x = x + tf.cast(self._positions.vectors[at], x.dtype)
        for block, (attention, kept) in enumerate(zip(self._attentions, self._kept, strict=True)):
            normal = self._norms[2 * block](x)
            kept.append(normal)
            x = x + attention(normal, tf.concat(kept, axis=1))
            widen, narrow = self._dense[2 * block : 2 * block + 2]
            x = x + narrow(widen(self._norms[2 * block + 1](x)))
        return tf.cast(self._dense[-1](self._norms[-1](x)), tf.float32)


def _chosen(logits: tf.Tensor, following: np.ndarray) -> np.ndarray:
    """In float32 for all of them, so that only the network differs."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(following), tf.cast(logits, tf.float32))
    return -losses.numpy()
