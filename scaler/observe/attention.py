"""How large the logits of an attention layer are, and how evenly it attends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from scaler.backend import bits
from scaler.backend.attention import LAYERS, Scores
from scaler.backend.layers import layers_of
from scaler.observe.exponents import magnitude_bits

_ONLY = "only keras.layers.MultiHeadAttention and GroupQueryAttention show their logits"
NOT_KERAS = f"{_ONLY}. Show those of another layer with hs.observe.probe(logits, name)."
NO_LAYER = f"{_ONLY}, and the watched layers have none of them."


def divided(layers: Mapping[str, keras.layers.Layer]) -> tuple[dict[str, keras.layers.Layer], list[str]]:
    """Of some layers those whose logits can be seen, and the paths of others with "attention" in their class's name.

    Args:
        layers: By path.
    """
    shown = {path: layer for path, layer in layers.items() if isinstance(layer, LAYERS)}
    hidden = [
        path
        for path, layer in layers.items()
        if "attention" in type(layer).__name__.lower() and not any(isinstance(one, LAYERS) for one in layers_of(layer))
    ]
    return shown, hidden


class Attention(NamedTuple):
    """What an attention layer did in a step, scalars in float32.

    Logits that grow without bound go before many divergences of transformers: Dehghani et al. 2023, "Scaling Vision
    Transformers to 22 Billion Parameters", arXiv:2302.05442; Wortsman et al. 2023, "Small-scale proxies for large-scale
    Transformer training instabilities", arXiv:2309.14322. So does an entropy that falls to 0: Zhai et al. 2023,
    "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", arXiv:2303.06296.

    Attributes:
        logit: The largest magnitude of a logit that is not masked, after the scale and before the softmax; infinity or
            NaN if one is.
        entropy: The mean over all heads and queries of -sum(p log p) over the keys, in nats: 0 for one key alone,
            log(n) for n keys alike. Queries without any key do not count; NaN without any query.
    """

    logit: tf.Tensor
    entropy: tf.Tensor


def attention_of(calls: Sequence[Callable[[], Scores]]) -> Attention:
    """What a layer did in all of its calls in a step, taken together.

    Args:
        calls: Functions that return the logits of one call each.
    """
    found = [_sums(one()) for one in calls]
    logit = bits.as_float(bits.largest([magnitude_bits(largest) for largest, _, _ in found]))
    return Attention(logit, tf.add_n([total for _, total, _ in found]) / tf.add_n([count for _, _, count in found]))


def _sums(scores: Scores) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The logits that count with 0 for the others, the sum of all queries' entropies, and the number of queries."""
    logits = tf.cast(scores.logits, tf.float32)
    counts = None if scores.mask is None else tf.broadcast_to(scores.mask, tf.shape(logits))
    if scores.axes > 1:
        shape = tf.concat([tf.shape(logits)[: -scores.axes], [-1]], axis=0)
        logits, counts = tf.reshape(logits, shape), counts if counts is None else tf.reshape(counts, shape)
    if counts is None:
        shifted = logits - tf.reduce_max(logits, axis=-1, keepdims=True)
        exponentials = tf.exp(shifted)
    else:
        logits = tf.where(counts, logits, 0.0)
        highest = tf.reduce_max(tf.where(counts, logits, logits.dtype.min), axis=-1, keepdims=True)
        shifted = tf.where(counts, logits - highest, 0.0)
        exponentials = tf.where(counts, tf.exp(shifted), 0.0)
    total = tf.reduce_sum(exponentials, axis=-1)
    # With Z = sum(exp(l)): -sum(p log p) = log Z - sum(p l).
    entropy = tf.math.log(total) - tf.reduce_sum(exponentials * shifted, axis=-1) / total
    if counts is None:
        return logits, tf.reduce_sum(entropy), tf.cast(tf.size(entropy), tf.float32)
    attends = tf.reduce_any(counts, axis=-1)
    return logits, tf.reduce_sum(tf.where(attends, entropy, 0.0)), tf.reduce_sum(tf.cast(attends, tf.float32))
