"""The layers of a Keras model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import keras


def layers_of(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The model itself and every layer in it, each once, also those in lists, dicts and wrappers.

    Of a subclass it has those that its attributes hold by now.
    """
    found: dict[int, keras.layers.Layer] = {}
    stack = [model]
    while stack:
        layer = stack.pop()
        if id(layer) not in found:
            found[id(layer)] = layer
            # Keras gives a Sequential a model inside, of the same layers, which has a dtype of its own.
            held = layer.layers if isinstance(layer, keras.Sequential) else vars(layer).values()
            stack += _layers_among(held)
    return list(found.values())


def _layers_among(values: Iterable) -> Iterator[keras.layers.Layer]:
    for value in values:
        if isinstance(value, keras.layers.Layer):
            yield value
        elif isinstance(value, (list, tuple, set)):
            yield from _layers_among(value)
        elif isinstance(value, dict):
            yield from _layers_among(value.values())
