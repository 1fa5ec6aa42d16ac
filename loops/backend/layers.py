"""The layers in a model, as often as it is called.

_flatten_layers    Keras's own list of the layers in a layer    absent: they are looked for, seventy times slower
"""

from __future__ import annotations

import keras

import scaler


def layers_now(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A model and the layers in it, also those in its layers, without what Keras adds by itself to name an input."""
    flattened = getattr(model, "_flatten_layers", lambda: scaler.observe.layers_of(model))
    return [layer for layer in flattened() if not isinstance(layer, keras.layers.InputLayer)]
