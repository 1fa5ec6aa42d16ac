"""Keras's attention layers: their logits and which of them count, and the two products inside of MultiHeadAttention.

_compute_attention       the projected queries and keys; both      absent: the logits are not seen, which a watch
                           products, which a subclass may            says; the products are left alone, with one warning
                           replace
_softmax                 is given the logits, unless one           absent: they are computed once more, from the same
                           operation makes all of the attention      queries and keys
_flash_attention         whether a kernel hides the logits         absent: counts as not
_compute_causal_mask     the mask of a causal call, where `call` makes none         absent: the products are left alone
_inverse_sqrt_key_dim    the factor of the scores
_dot_product_equation    the equation of the first product
_combine_equation        that of the second
_masked_softmax          what is between them
_dropout_layer           the same
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend.layers import set_method
from scaler.backend.versions import say_once

LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
"""The layers whose logits can be seen."""
OF_ITS_OWN = (
    "it computes attention in a way of its own, so its logits cannot be seen. Show them with "
    "hs.observe.probe(logits, name)."
)
FLASH = "flash attention computes its logits inside of one kernel, which shows none of them."


class Scores(NamedTuple):
    """The logits of one call of a layer.

    Attributes:
        logits: As the softmax gets them, scaled and before the mask.
        mask: Bool, which of them count, of a shape that broadcasts to theirs; None for all.
        axes: How many of the last axes are the keys.
    """

    logits: tf.Tensor
    mask: tf.Tensor | None
    axes: int


def show_scores(
    layer: Any, see: Callable[[Callable[[], Scores]], None], hides: Callable[[str], None]
) -> Callable[[], None]:
    """Has an attention layer show its logits at each call, and returns what undoes it.

    Args:
        layer: One of `LAYERS`.
        see: Is called with a function that returns the logits. Operations that the layer does without are added where
            that function is called.
        hides: Is called with the reason, a sentence, if the layer does not show its logits.
    """
    attend = getattr(layer, "_compute_attention", None)
    if attend is None:
        hides(OF_ITS_OWN)
        return lambda: None

    @functools.wraps(attend)
    def watched(*arguments: Any, **named: Any) -> Any:
        shown: list[Scores] = []
        with _softmax_of(layer, shown):
            found = attend(*arguments, **named)
        given = inspect.signature(attend).bind(*arguments, **named).arguments
        if shown:
            for scores in shown:
                see(functools.partial(Scores, *scores))
        elif getattr(layer, "_flash_attention", False):
            hides(FLASH)
        elif attend.__module__.partition(".")[0] == "keras" and len(given["query"].shape) == 4:
            see(functools.partial(_computed, given))
        else:
            hides(OF_ITS_OWN)
        return found

    return set_method(layer, "_compute_attention", watched)


@contextlib.contextmanager
def _softmax_of(layer: Any, shown: list[Scores]) -> Iterator[None]:
    """Within it, what the layer's softmax is given goes to a list."""
    softmax = getattr(layer, "_softmax", None)
    if softmax is None:
        yield
        return
    call = softmax.call

    @functools.wraps(call)
    def watched(scores: tf.Tensor, mask: Any = None, **named: Any) -> Any:
        axes = len(softmax.axis) if isinstance(softmax.axis, (tuple, list)) else 1
        shown.append(Scores(scores, None if mask is None else tf.cast(mask, tf.bool), axes))
        return call(scores, mask, **named)

    with contextlib.ExitStack() as stack:
        stack.callback(set_method(softmax, "call", watched))
        yield


def _computed(given: dict[str, Any]) -> Scores:
    """The logits once more, by the formula of `keras.ops.dot_product_attention`, which keeps its own to itself."""
    query, key, mask = given["query"], given["key"], given.get("attention_mask")
    logits = tf.cast(tf.einsum("BTNH,BSNH->BNTS", query, key), tf.float32)
    logits *= 1.0 / math.sqrt(query.shape[-1])
    if mask is not None:
        # From [..., T, S] to [batch, heads, T, S].
        mask = tf.cast(mask, tf.bool)
        for _ in range(4 - mask.shape.rank):
            mask = tf.expand_dims(mask, -3)
    if given.get("use_causal_mask"):
        before = tf.linalg.band_part(tf.ones(tf.shape(logits)[2:], tf.bool), -1, 0)
        mask = before if mask is None else tf.logical_and(mask, before)
    return Scores(logits, mask, 1)


PRODUCTS = "_compute_attention"
"""The method that `replace_products` sets on a layer."""
_METHODS = (PRODUCTS, "_compute_causal_mask", "_masked_softmax")


def is_plain(layer: keras.layers.MultiHeadAttention) -> bool:
    """Whether the layer computes its products as Keras's own class does."""
    own, kind = keras.layers.MultiHeadAttention, type(layer)
    if not all(hasattr(own, name) for name in _METHODS) or not hasattr(layer, "_inverse_sqrt_key_dim"):
        say_once("computes attention in another way: its products are not emulated.")
        return False
    return all(getattr(kind, name) is getattr(own, name) for name in _METHODS)


def replace_products(layer: keras.layers.MultiHeadAttention, einsum: Callable) -> None:
    """Lets a layer compute its products by `einsum(is_first, equation, left, right)`.

    Without a fused kernel, which has no place between its products.
    """

    def compute(
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple:
        if use_causal_mask:
            causal = layer._compute_causal_mask(query, value)
            attention_mask = causal if attention_mask is None else keras.ops.logical_and(attention_mask, causal)
        query = keras.ops.multiply(query, keras.ops.cast(layer._inverse_sqrt_key_dim, query.dtype))
        scores = einsum(True, layer._dot_product_equation, key, query)
        weights = scores = layer._masked_softmax(scores, attention_mask)
        if layer.dropout > 0.0:
            weights = layer._dropout_layer(scores, training=training)
        return einsum(False, layer._combine_equation, weights, value), scores

    object.__setattr__(layer, PRODUCTS, compute)
