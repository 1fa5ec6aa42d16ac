"""What the forward pass of a model moves by itself, and a skipped step puts back."""

from __future__ import annotations

from typing import Any

import keras

import scaler


def state_of(model: keras.Model) -> list[Any]:
    """The model's non-trainable variables, and what Keras does not count among them.

    A stateful RNN keeps its states beside the model's variables. SpectralNormalization assigns a trainable weight in
    every forward pass.
    """
    found = list(model.non_trainable_variables)
    for layer in scaler.observe.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states is not None:
            found += keras.tree.flatten(layer.states)
        if isinstance(layer, keras.layers.SpectralNormalization):
            found.append(layer.kernel)
    return list({id(variable): variable for variable in found}.values())
