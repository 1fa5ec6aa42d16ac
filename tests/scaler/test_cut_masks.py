"""Guards that a model with cuts is the model without: its outputs, their masks, and what losses read of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler

L = keras.layers
TOKENS = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 1, 2, 0, 0]])
FLOATS = np.where(TOKENS[..., None] > 0, np.linspace(-1.0, 1.0, 48).reshape(2, 6, 4), 0.0).astype(np.float32)


def tokens():
    return keras.Input([6], dtype="int32")


def words(x, name="cut"):
    return L.Embedding(10, 4, mask_zero=True, name=name)(x)


def sequential():
    layers = [L.Embedding(10, 4, mask_zero=True, name="cut"), L.SimpleRNN(4, return_sequences=True), L.Dense(3)]
    return keras.Sequential([keras.Input([6], dtype="int32"), *layers]), TOKENS


def behind_masking():
    x = keras.Input([6, 4])
    model = keras.Model(x, L.Dense(3)(L.SimpleRNN(4, return_sequences=True)(L.Masking(name="cut")(x))))
    model.supports_masking = True
    return model, FLOATS


def attention():
    x = tokens()
    h = words(x)
    return keras.Model(x, L.Dense(3)(L.LayerNormalization()(L.MultiHeadAttention(2, 2)(h, h)))), TOKENS


def nested():
    x = tokens()
    inner = keras.Input([6, 4])
    body = keras.Model(inner, L.SimpleRNN(4, return_sequences=True)(inner), name="body")
    body.supports_masking = True  # Else Keras warns, with cuts and without.
    encoder = keras.Sequential([tokens(), L.Embedding(10, 4, mask_zero=True)], name="cut")
    return keras.Model(x, L.Dense(3)(body(encoder(x)))), TOKENS


def mask_of_a_cut():
    """A mask is computed from what comes before the cut, and used behind it: it has no gradient."""
    x = keras.Input([6, 4])
    h = L.Dense(4, name="cut")(L.Dense(4, activation="relu", name="before")(x))
    mask = keras.ops.any(keras.ops.greater(h, 0.0), axis=-1)
    return keras.Model(x, L.Dense(3)(L.SimpleRNN(4, return_sequences=True)(h, mask=mask))), FLOATS


def two_of_each():
    x, other = tokens(), keras.Input([6, 4])
    h = L.Concatenate(name="cut")([words(x, "left"), L.Masking()(other)])
    outputs = {"steps": L.Dense(3)(h), "last": L.GRU(2)(h), "kinds": keras.ops.argmax(h, axis=-1)}
    return keras.Model([x, other], outputs), [TOKENS, FLOATS]


def probabilities():
    x = tokens()
    return keras.Model(x, L.Dense(3, activation="softmax")(words(x))), TOKENS


def cut_of(make):
    keras.utils.set_random_seed(0)
    model, x = make()
    rescaled, layerwise = scaler.layerwise.insert_rescales(model, "cut")
    layerwise._scales["*"]._state["loss_scale"].assign([4.0, 1024.0])
    return model, rescaled, layerwise, keras.tree.map_structure(tf.constant, x)


def seen(model, x):
    """The outputs, and the masks that Keras's losses find on them."""
    outputs = keras.tree.flatten(model(x, training=True))
    return outputs, [mask for mask in (getattr(one, "_keras_mask", None) for one in outputs) if mask is not None]


@pytest.mark.slow_with("mask_of_a_cut", "two_of_each")
@pytest.mark.parametrize("make", [sequential, attention, nested, probabilities, mask_of_a_cut, two_of_each])
def test_masks_and_outputs_pass_bit_for_bit(make):
    model, rescaled, _, x = cut_of(make)
    masked = {}

    def both():
        (plain, masks), (found, found_masks) = seen(model, x), seen(rescaled, x)
        masked["plain"], masked["cut"] = len(masks), len(found_masks)
        return [*plain, *masks], [*found, *found_masks]

    # A mask takes the same way in eager mode and in a graph: one of the models is traced, too.
    for run in (both, tf.function(both)) if make is attention else (both,):
        for plain, found in zip(*run(), strict=True):
            assert plain.numpy().tobytes() == found.numpy().tobytes()
        assert masked["plain"] == masked["cut"]
        assert masked["plain"] > 0 or make is mask_of_a_cut


def test_a_mask_given_to_the_model_passes():
    model, rescaled, _, x = cut_of(behind_masking)
    mask = tf.constant(TOKENS == 1)
    np.testing.assert_array_equal(rescaled(x, mask=mask), model(x, mask=mask))


@pytest.mark.parametrize("make", [sequential, probabilities])
def test_a_step_with_a_masked_loss_is_the_same_step(make):
    model, rescaled, layerwise, x = cut_of(make)
    start, y = model.get_weights(), tf.constant(TOKENS % 3)
    ends = []
    for one, scales in ((model, None), (rescaled, layerwise)):
        model.set_weights(start)
        step = loops.TrainStep(
            one,
            keras.losses.SparseCategoricalCrossentropy(from_logits=make is not probabilities),
            keras.optimizers.SGD(0.5),
            loss_scaler=scaler.LossScaler(scaler.NoScaling()),
            layerwise=scales,
        )
        ends.append((float(step((x, y))["loss"]), [weight.tobytes() for weight in model.get_weights()]))
    assert ends[0] == ends[1]
