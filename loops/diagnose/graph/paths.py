"""The layers of a model by path, and those that a cure may choose among."""

from __future__ import annotations

from collections.abc import Sequence

import keras

import scaler


def paths_of(models: Sequence[keras.layers.Layer]) -> dict[str, keras.layers.Layer]:
    """Every layer that computes something itself, by path: a model is one unless its class is Keras's own.

    Where there are several models the paths begin with their names.
    """
    found: dict[str, keras.layers.Layer] = {}
    for model in models:
        prefix = f"{model.name}/" if len(models) > 1 else ""
        for path, layer in scaler.observe.layers_by_path(model).items():
            # What a model of Keras's own classes computes beside its layers is a cast of its inputs.
            if layer is not model or not _is_of_keras(model):
                found[path if layer is model else prefix + path] = layer
    return found


def units(models: Sequence[keras.layers.Layer]) -> dict[str, keras.layers.Layer]:
    """The layers that are given a dtype one by one: Keras's own whole, and of others each layer in them.

    The parts of a layer such as `MultiHeadAttention` hand each other what they compute, and go together.
    """
    chosen: dict[str, keras.layers.Layer] = {}
    for path, layer in paths_of(models).items():
        inside = any(path.startswith(f"{other}/") and _is_of_keras(one) for other, one in chosen.items())
        if not inside and not isinstance(layer, keras.Model):
            chosen[path] = layer
    return chosen


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    return type(layer).__module__.startswith("keras.")
