"""What `emulated` and `unit_scaled` have made of a model's layers."""

from __future__ import annotations

import keras

from scaler.backend.layers import layers_by_path
from scaler.formats.layers import EMULATED_BY, UNIT


def changed(model: keras.layers.Layer) -> dict[str, str]:
    """How the layers of a model compute otherwise than Keras has them, in words.

    Args:
        model: A model, or one layer.

    Returns:
        By the paths of the layers that were changed, as in `scaler.observe.layers_by_path`: the `Emulated` that rounds
        their products, "unit_scaled", or both.
    """
    found = {path: _of(layer) for path, layer in layers_by_path(model).items()}
    return {path: words for path, words in found.items() if words}


def _of(layer: keras.layers.Layer) -> str:
    emulated = getattr(layer, EMULATED_BY, None)
    words = [] if emulated is None else [repr(emulated)]
    return ", ".join([*words, "unit_scaled"] if hasattr(layer, UNIT) else words)
