"""The own losses of models and layers: weight regularisation, and what layers add."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

import scaler


def penalties(models: Sequence[keras.layers.Layer]) -> list[tf.Tensor]:
    """The own losses of several models, each once: those of a layer that several of them share, too.

    Args:
        models: Models and layers, of which one may be in another.
    """
    inside = [id(layer) for model in models for layer in scaler.observe.layers_of(model)]
    if len(set(inside)) == len(inside):
        return [loss for model in models for loss in model.losses]
    # Keras counts the layers and the weights in a layer once.
    around = keras.layers.Layer(name="around")
    around.models = list(models)
    return around.losses
