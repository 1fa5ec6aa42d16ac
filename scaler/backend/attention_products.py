"""The two products inside of Keras's MultiHeadAttention.

_compute_attention       both products of a layer, which a subclass may replace   absent: the products are left alone,
_compute_causal_mask     the mask of a causal call, where `call` makes none         with one warning
_inverse_sqrt_key_dim    the factor of the scores
_dot_product_equation    the equation of the first product
_combine_equation        that of the second
_masked_softmax          what is between them
_dropout_layer           the same
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from scaler.backend.versions import say_once

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
