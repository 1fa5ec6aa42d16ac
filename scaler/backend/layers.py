"""The layers of a Keras model."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

import keras


def layers_of(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The model itself and every layer in it, each once, also those in lists, dicts and wrappers.

    Of a subclass it has those that its attributes hold by now.
    """
    return list(layers_by_path(model).values())


def layers_by_path(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """The model and every layer in it, by the names on the way to it: "dense", "encoder/attention/query".

    The model itself is first, under its own name, which is no part of the other paths. A layer that is held in several
    places has the shortest of its paths; of several that would share one path, the later ones get ":2", ":3", ....

    Args:
        model: A model or a layer.
    """
    found: dict[str, keras.layers.Layer] = {model.name: model}
    seen = {id(model)}
    waiting = collections.deque([("", model)])
    while waiting:
        path, holder = waiting.popleft()
        # Keras gives a Sequential a model inside, of the same layers, which has a dtype of its own.
        held = holder.layers if isinstance(holder, keras.Sequential) else list(vars(holder).values())
        for layer in _layers_among(held):
            if id(layer) not in seen:
                seen.add(id(layer))
                own = unused(f"{path}{layer.name}", found)
                found[own] = layer
                waiting.append((f"{own}/", layer))
    return found


def unused(path: str, taken: dict) -> str:
    """The path, with ":2", ":3", ... behind it if it is taken."""
    number, free = 1, path
    while free in taken:
        number += 1
        free = f"{path}:{number}"
    return free


def _layers_among(values: Iterable) -> Iterator[keras.layers.Layer]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, keras.layers.Layer):
            yield value
        elif isinstance(value, (list, tuple, set, dict)):
            yield from _layers_among(value)
