"""Adds gradient checkpointing to a model while a function is traced."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import patched

_FEWEST = 4
"""The fewest layers of a Sequential that are worth dividing into blocks."""


def blocks_of(model: keras.Model) -> list[list[keras.layers.Layer]]:
    """The blocks that would be recomputed: each layer of the model that contains others, or parts of a Sequential.

    A Sequential of n layers is divided into about sqrt(n) blocks, which needs the least memory if all layers save about
    as much.

    Returns:
        A list of layers for each block; empty if no layer of the model contains others, so that the model has no
        natural blocks.
    """
    layers = [layer for layer in _held(model) if not isinstance(layer, keras.layers.InputLayer)]
    if isinstance(model, keras.Sequential) and len(layers) >= _FEWEST:
        size = math.ceil(len(layers) / math.isqrt(len(layers)))
        return [layers[start : start + size] for start in range(0, len(layers), size)]
    return [[layer] for layer in layers if len(scaler.observe.layers_of(layer)) > 1]


@contextlib.contextmanager
def checkpointed(model: keras.Model) -> Iterator[None]:
    """Recomputes the blocks of a model in the backward pass, with `tf.recompute_grad`.

    Use it for tracing only: a recomputed block draws new random numbers, as for Dropout, and updates its statistics
    twice.
    """
    in_parts = isinstance(model, keras.Sequential)
    layers = [model] if in_parts else [layer for (layer,) in blocks_of(model)]
    with scaler.authoring.calls_through(layers, _in_parts if in_parts else _recomputing):
        yield


def _held(model: keras.Model) -> list[keras.layers.Layer]:
    paths = scaler.observe.layers_by_path(model)
    return [layer for path, layer in paths.items() if "/" not in path and layer is not model]


def _in_parts(model: keras.Sequential, call: Callable, /, inputs: Any, training: Any = None, **options: Any) -> Any:
    for block in blocks_of(model):
        inputs = tf.recompute_grad(functools.partial(_through, block, training))(inputs)
    return inputs


def _through(block: list[keras.layers.Layer], training: bool | None, x: Any) -> Any:
    for layer in block:
        x = layer(x, training=training)  # Keras drops `training` if the layer does not accept it.
    return x


def _recomputing(layer: keras.layers.Layer, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
    def again(*tensors: Any) -> Any:
        given = iter(tensors)
        filled = tf.nest.map_structure(lambda one: next(given) if _flows(one) else one, (args, kwargs))
        # The layer itself casts inputs and weights. In the second call the outer call's `training` is lost.
        with patched(layer, "call", call):
            return layer(*filled[0], **{"training": True, **filled[1]})

    return tf.recompute_grad(again)(*(one for one in tf.nest.flatten((args, kwargs)) if _flows(one)))


def _flows(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating
