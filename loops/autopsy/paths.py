"""The layers of a model by path, and those that a cure may choose among."""

from __future__ import annotations

import keras

from loops.layers import layers_of


def paths_of(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """Every layer in a model, by names from the model down, such as "encoder/dense"; the model itself is not in it.

    Where two have the same path the second one ends in "_2".
    """
    found: dict[str, keras.layers.Layer] = {}
    seen = {id(model)}

    def add(owner: keras.layers.Layer, prefix: str) -> None:
        for layer in _children(owner):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            path, number = prefix + layer.name, 1
            while path in found:
                number += 1
                path = f"{prefix}{layer.name}_{number}"
            found[path] = layer
            add(layer, f"{path}/")

    add(model, "")
    return found


def _children(owner: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers directly in another one, in the order of its attributes."""
    inside = layers_of(owner)[1:]
    nested = {id(below) for one in inside for below in layers_of(one)[1:]}
    children = [one for one in inside if id(one) not in nested]
    order = {id(one): place for place, one in enumerate(getattr(owner, "layers", ()))}
    return sorted(children, key=lambda one: order.get(id(one), len(order)))


def units(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """The layers that are given a dtype one by one: Keras's own whole, and of others each layer in them.

    The parts of a layer such as `MultiHeadAttention` hand each other what they compute, and go together.
    """
    chosen: dict[str, keras.layers.Layer] = {}
    for path, layer in paths_of(model).items():
        inside = any(path.startswith(f"{other}/") and _whole(one) for other, one in chosen.items())
        if not inside and not isinstance(layer, keras.Model):
            chosen[path] = layer
    return chosen


def _whole(layer: keras.layers.Layer) -> bool:
    return type(layer).__module__.startswith("keras.")
