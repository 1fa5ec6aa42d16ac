"""Restores everything that a forward pass may change, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

import scaler
from loops.loop.state.randomness import generators, set_generators


@contextlib.contextmanager
def restored(layer: keras.layers.Layer) -> Iterator[None]:
    """Restores the variables of a layer and of the layers in it, and the random generators of the process."""
    variables = {id(variable): variable for one in scaler.observe.layers_of(layer) for variable in one.variables}
    values = [(variable, variable.numpy()) for variable in variables.values()]
    random = generators()
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
        set_generators(random)
