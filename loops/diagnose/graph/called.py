"""Which Keras layers a step calls while it is traced, whether or not the step names their model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras


@contextlib.contextmanager
def recording_called() -> Iterator[dict[int, keras.layers.Layer]]:
    """Collects the layers that are called in this context, by their `id`; a layer stands before those that it calls."""
    called: dict[int, keras.layers.Layer] = {}
    original = keras.layers.Layer.__call__

    @functools.wraps(original)
    def recorded(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        called.setdefault(id(layer), layer)
        return original(layer, *args, **kwargs)

    keras.layers.Layer.__call__ = recorded
    try:
        yield called
    finally:
        keras.layers.Layer.__call__ = original
