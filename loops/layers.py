"""The layers of a Keras model, for the rooms of `loops`."""

import scaler

layers_of = scaler.observe.layers_of
