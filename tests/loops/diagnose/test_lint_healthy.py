"""Guards that lint finds nothing in the standard models, as they are built everywhere: there notes are all it has."""

import keras
import numpy as np
import pytest

import scaler
from loops.observe import lint

L = keras.layers
CLASSES = 8
LABELS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.uniform(0.0, 1.0, [8, 16, 16, 3]).astype(np.float32)
TOKENS = RANDOM.integers(1, 50, [8, 12])
CLASS = RANDOM.integers(0, CLASSES, [8])


@pytest.fixture(autouse=True)
def in_float16():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def logits(x):
    return L.Dense(CLASSES, dtype="float32")(x)


def mlp(x, width):
    return L.Dense(x.shape[-1])(L.Dense(width, activation="gelu")(x))


def pre_norm(x):
    h = L.LayerNormalization()(x)
    x = L.Add()([x, L.MultiHeadAttention(4, 16, dropout=0.1)(h, h)])
    return L.Add()([x, mlp(L.LayerNormalization()(x), 128)])


def post_norm(x):
    x = L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(4, 16)(x, x, use_causal_mask=True)]))
    return L.LayerNormalization()(L.Add()([x, L.Dropout(0.1)(mlp(x, 128))]))


def words(mask_zero=False):
    x = keras.Input([12], dtype="int32")
    positions = L.Embedding(12, 64)(keras.ops.arange(12))
    return x, L.Embedding(50, 64, mask_zero=mask_zero)(x) + positions


def post_norm_transformer():
    x, h = words()
    h = post_norm(post_norm(L.LayerNormalization()(h)))
    return keras.Model(x, L.Dense(50, dtype="float32")(h)), LABELS, TOKENS, TOKENS


def vit():
    x = keras.Input([16, 16, 3])
    h = L.Reshape([16, 64])(L.Conv2D(64, 4, strides=4)(x))
    h = pre_norm(h + L.Embedding(16, 64)(keras.ops.arange(16)))
    return keras.Model(x, logits(L.LayerNormalization()(h)[:, 0])), LABELS, IMAGES, CLASS


def resnet():
    def block(x, channels, strides):
        h = L.ReLU()(L.BatchNormalization()(L.Conv2D(channels, 3, strides, padding="same", use_bias=False)(x)))
        h = L.BatchNormalization()(L.Conv2D(channels, 3, padding="same", use_bias=False)(h))
        if strides > 1:
            x = L.BatchNormalization()(L.Conv2D(channels, 1, strides, use_bias=False)(x))
        return L.ReLU()(L.Add()([x, h]))

    x = keras.Input([16, 16, 3])
    h = L.ReLU()(L.BatchNormalization()(L.Conv2D(16, 3, padding="same", kernel_initializer="he_normal")(x)))
    h = block(block(L.MaxPooling2D()(h), 16, 1), 32, 2)
    return keras.Model(x, logits(L.GlobalAveragePooling2D()(h))), LABELS, IMAGES, CLASS


def lstm():
    x = keras.Input([12], dtype="int32")
    h = L.Embedding(50, 32, mask_zero=True)(x)
    h = L.Bidirectional(L.LSTM(16))(L.Bidirectional(L.LSTM(16, return_sequences=True))(h))
    return keras.Model(x, logits(L.Dropout(0.2)(h))), LABELS, TOKENS, CLASS


def u_net():
    def twice(x, channels):
        for _ in range(2):
            x = L.ReLU()(L.BatchNormalization()(L.Conv2D(channels, 3, padding="same")(x)))
        return x

    x = keras.Input([16, 16, 3])
    wide = twice(x, 8)
    deep = twice(L.MaxPooling2D()(wide), 16)
    h = twice(L.Concatenate()([wide, L.Conv2DTranspose(8, 2, 2)(deep)]), 8)
    mask = (IMAGES[..., :1] > 0.5).astype(np.float32)
    out = L.Conv2D(1, 1, dtype="float32")(L.UpSampling2D()(L.AveragePooling2D(2)(h)))
    return keras.Model(x, out), keras.losses.BinaryCrossentropy(from_logits=True), IMAGES, mask


@pytest.mark.slow_with("vit")
@pytest.mark.exhaustive_with("lstm", "post_norm_transformer", "resnet", "u_net")
@pytest.mark.parametrize("make", [post_norm_transformer, vit, resnet, lstm, u_net])
def test_a_standard_model_has_no_finding(make):
    model, loss, x, y = make()
    findings = lint(model, scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), loss, (x, y))
    assert [one for one in findings if not one.is_note] == []
    out_of_reach = {type(one).__name__ for one in model.layers if any(one.name == note.layer for note in findings)}
    assert ("MultiHeadAttention" in out_of_reach) == (make in (post_norm_transformer, vit))
