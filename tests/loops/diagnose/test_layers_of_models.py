"""Guards the walk over a model's layers, which finds what Keras's own finds, and their calls through a function."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import stateful_model

from scaler.backend.layers import calls_through, layers_of


class _Nested(keras.Model):
    """Layers in lists, dicts and attributes, one of them twice."""

    def __init__(self):
        super().__init__()
        self.shared = keras.layers.Dense(2)
        self.listed = [keras.layers.Dense(2), [self.shared, keras.layers.Dense(3)]]
        self.named = {"a": keras.layers.Dense(2), "b": (keras.layers.Dense(2),)}
        self.wrapped = keras.layers.TimeDistributed(keras.layers.Dense(2))
        self.inside = keras.Sequential([keras.layers.Dense(2)])

    def call(self, x):
        return self.shared(x)


def functional():
    x = keras.Input([3, 4])
    inner = keras.Sequential([keras.Input([3, 16]), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    return keras.Model(x, inner(keras.layers.Bidirectional(keras.layers.LSTM(8, return_sequences=True))(x)))


MODELS = {
    "nested": _Nested,
    "functional": functional,
    "sequential": stateful_model,
    "unbuilt": lambda: keras.Sequential([keras.layers.Dense(2)]),
    "stacked": lambda: keras.layers.StackedRNNCells([keras.layers.LSTMCell(2), keras.layers.GRUCell(2)]),
    "rnn": lambda: keras.layers.RNN([keras.layers.LSTMCell(2), keras.layers.GRUCell(2)]),
    "attention": lambda: keras.layers.MultiHeadAttention(2, 2),
    "preprocessing": lambda: keras.layers.Pipeline([keras.layers.Rescaling(0.5), keras.layers.RandomFlip()]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_keras_finds_is_found_and_no_other(name):
    model = MODELS[name]()
    if name == "attention":
        model(tf.zeros([1, 2, 4]), tf.zeros([1, 2, 4]))
    keras_has = {id(layer) for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)}
    found = [layer for layer in layers_of(model) if not isinstance(layer, keras.layers.InputLayer)]
    assert {id(layer) for layer in found} == keras_has
    assert len(found) == len(keras_has)


def test_calls_go_through_a_function_and_the_layer_is_as_before():
    layer, x = keras.layers.Dense(2), tf.ones([1, 3])
    plain, called = layer(x), []

    def doubled(layer, call, /, *arguments, **named):
        called.append(layer)
        return 2.0 * call(*arguments, **named)

    with calls_through([layer], doubled), calls_through([layer], doubled):
        np.testing.assert_array_equal(layer(x), 4.0 * plain)
    with pytest.raises(ZeroDivisionError), calls_through([layer], doubled):
        raise ZeroDivisionError
    assert called == [layer, layer]
    assert "call" not in vars(layer)
    np.testing.assert_array_equal(layer(x), plain)
