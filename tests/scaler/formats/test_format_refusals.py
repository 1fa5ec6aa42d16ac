"""Guards what formats refuse, each in its own sentence, and that a model which was refused is as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler
from scaler.formats import emulated, unit_cross_entropy, unit_scaled

layers = keras.layers


def numbers(*shape):
    return np.ones(shape, np.float32)


def small():
    inputs = keras.Input([6], name="inputs")
    return keras.Sequential([inputs, layers.Dense(4, name="one"), layers.Dense(2, name="two")], name="small")


def of(layer, shape=(4,)):
    """A model of a dense layer and another."""
    return keras.Sequential([keras.Input(shape), layers.Dense(2, name="first"), layer], name="small")


class Doubled(layers.Dense):
    """Computes something else."""

    def call(self, inputs, training=None):
        """Twice."""
        return 2 * super().call(inputs)


class Subclass(keras.Model):
    def call(self, inputs):
        return inputs


def emulated_model():
    return emulated("mxfp4")(small())


def quantized():
    model = small()
    model.layers[1].quantize("int8")
    return model


def called_twice():
    inputs, shared = keras.Input([4]), layers.Dense(4, name="shared")
    return keras.Model(inputs, shared(shared(inputs)))


def product(equation, left, right, **arguments):
    return lambda: emulated("float32", **arguments).einsum(equation, numbers(*left), numbers(*right))


def logits(shape):
    losses = tf.function(lambda x: unit_cross_entropy(tf.constant([0]), x))
    return lambda: losses.get_concrete_function(tf.TensorSpec(shape))


NARROW = {"accumulators": "float16"}
REFUSED = {
    "no format": lambda: emulated("float8"),
    "no format of gradients": lambda: emulated("mxfp4", gradients="e5m2"),
    "no scaling": lambda: emulated("float8_e4m3fn", scaling="late"),
    "an array as scaling": lambda: emulated("float8_e4m3fn", scaling=np.ones(2)),
    "scales of blocks": lambda: emulated("mxfp4", scaling="current"),
    "stochastic as text": lambda: emulated("mxfp4", stochastic="weights"),
    "stochastic biases": lambda: emulated("mxfp4", stochastic=["biases"]),
    "stochastic as a flag": lambda: emulated("mxfp4", stochastic=True),
    "a negative seed": lambda: emulated("mxfp4", seed=-1),
    "two models": lambda: emulated("mxfp4")([small(), small()]),
    "only nothing": lambda: emulated("mxfp4")(small(), only=[]),
    "only as text": lambda: emulated("mxfp4")(small(), only="one"),
    "only one that is not there": lambda: emulated("mxfp4")(small(), only=["three"]),
    "no layer to emulate": lambda: emulated("mxfp4")(keras.Sequential([Doubled(2)], name="small")),
    "a layer without weights": lambda: emulated("float8_e4m3fn")(keras.Sequential([layers.Dense(2, name="one")])),
    "a layer that is emulated": lambda: emulated("mxfp8_e4m3")(emulated_model()),
    "a layer that is quantized": lambda: emulated("mxfp4")(quantized()),
    "a layer that is unit-scaled": lambda: emulated("mxfp4")(unit_scaled(small())),
    "integers": lambda: emulated("mxfp4").einsum("ab,bc->ac", [[1]], [[1]]),
    "no equation": lambda: emulated("mxfp4").einsum(None, numbers(2, 2), numbers(2, 2)),
    "half an equation": lambda: emulated("mxfp4").einsum("ab,bc", numbers(2, 2), numbers(2, 2)),
    "a vector as a matrix": lambda: emulated("mxfp4").einsum("ab,bc->ac", numbers(2, 2), numbers(2)),
    "delayed scales without a layer": lambda: emulated("float8_e4m3fn").einsum(
        "ab,bc->ac", numbers(2, 2), numbers(2, 2)
    ),
    "no accumulator": lambda: emulated("float32", accumulators="float32"),
    "a number as accumulator": lambda: emulated("float32", accumulators=16),
    **{
        f"a chunk of {chunk!r}": lambda chunk=chunk: emulated("float32", accumulators="float16", chunk=chunk)
        for chunk in (0, -1, 1.5, True, "16")
    },
    "a chunk of no accumulator": lambda: emulated("float32", chunk=16),
    "an axis twice": product("aab,bc->ac", (2, 2, 3), (3, 2), **NARROW),
    "an axis that is summed alone": product("ab,bc->c", (2, 3), (3, 2), **NARROW),
    "an axis from nowhere": product("ab,bc->acd", (2, 3), (3, 2), **NARROW),
    "an axis of two sizes": product("ab,bc->ac", (2, 3), (4, 2), **NARROW),
    "unit scaling, no rule for PReLU": lambda: unit_scaled(of(layers.PReLU(name="odd"))),
    "unit scaling, no rule for one's own": lambda: unit_scaled(of(Doubled(3, name="odd"))),
    "unit scaling, no rule for LSTM": lambda: unit_scaled(of(layers.LSTM(3, name="odd"), (4, 2))),
    "unit scaling, softmax": lambda: unit_scaled(of(layers.Activation("softmax", name="odd"))),
    "unit scaling, softmax of a dense layer": lambda: unit_scaled(of(layers.Dense(3, "softmax", name="odd"))),
    "unit scaling, a layer called twice": lambda: unit_scaled(called_twice()),
    "unit scaling, twice": lambda: unit_scaled(unit_scaled(small())),
    "unit scaling, a subclass": lambda: unit_scaled(Subclass(name="own")),
    "unit scaling, a model without inputs": lambda: unit_scaled(keras.Sequential([layers.Dense(3)], name="small")),
    "unit scaling, a name": lambda: unit_scaled("model"),
    "unit scaling, a layer": lambda: unit_scaled(layers.Dense(3, name="one")),
    "logits of one class": logits([4, 1]),
    "logits of any number of classes": logits([4, None]),
    "logits of any shape": logits(None),
}


def test_sentences(snapshot):
    said = {}
    for name, make in REFUSED.items():
        with pytest.raises(scaler.InvalidArgument) as caught:
            make()
        said[name] = str(caught.value).partition("\n(at ")[0]
    assert said == snapshot


@pytest.mark.parametrize("change", [emulated("mxfp4"), unit_scaled], ids=["emulated", "unit-scaled"])
def test_a_model_that_is_refused_stays_as_it_was(change):
    model = quantized() if change is not unit_scaled else of(layers.PReLU(name="odd"))
    before = model.get_weights()
    with pytest.raises(scaler.InvalidArgument):
        change(model)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert scaler.formats.changed(model) == {}
    assert not any(hasattr(layer, "halfstep_emulated") for layer in model.layers)
