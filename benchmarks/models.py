"""Models and batches that several benchmarks train, under any dtype policy."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import loops.tasks


class Problem(NamedTuple):
    """A model to train, the loss, and a batch."""

    model: keras.Model
    loss: object
    batch: tuple[tf.Tensor, tf.Tensor]


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean over all labels, in float32."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32)))


def digits_cnn(policy: str, batch_size: int) -> Problem:
    """The network of `halfstep lab study` on its real digits."""
    task = loops.tasks.load("digits")
    batch = tf.constant(task.images[:batch_size]), tf.constant(task.labels[:batch_size])
    return Problem(task.model(policy), task.loss, batch)


def digits_mlp(policy: str) -> keras.Model:
    """Two hidden layers of 128 for the same digits."""
    return keras.Sequential(
        [
            keras.layers.Input([8, 8, 1]),
            keras.layers.Flatten(dtype=policy),
            keras.layers.Dense(128, activation="relu", dtype=policy),
            keras.layers.Dense(128, activation="relu", dtype=policy),
            keras.layers.Dense(10, dtype=policy),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )


def mlp(policy: str, batch_size: int = 64) -> Problem:
    """Two hidden layers of 256, on random rows."""
    layers = [keras.layers.Dense(256, activation="relu", dtype=policy) for _ in range(2)]
    model = keras.Sequential([keras.layers.Input([64]), *layers, keras.layers.Dense(10, dtype=policy)])
    return Problem(model, cross_entropy, _random([batch_size, 64]))


def small_cnn(policy: str, batch_size: int = 64) -> Problem:
    """Four convolutions with BatchNorm, on random images of 8 x 8."""
    images = x = keras.layers.Input([8, 8, 1])
    for filters in (16, 32, 32, 64):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, dtype=policy)(x)
        x = keras.layers.ReLU(dtype=policy)(keras.layers.BatchNormalization(dtype=policy)(x))
    x = keras.layers.Dense(10, dtype=policy)(keras.layers.GlobalAveragePooling2D(dtype=policy)(x))
    return Problem(keras.Model(images, x), cross_entropy, _random([batch_size, 8, 8, 1]))


def _random(shape: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(0)
    return tf.constant(rng.standard_normal(shape, np.float32)), tf.constant(rng.integers(0, 10, shape[0]), tf.int32)


def transformer(policy: str, *, layers=4, width=128, heads=4, length=64, words=1000, batch_size=8) -> Problem:
    """A pre-norm encoder that predicts a word at each place, on random words."""
    tokens = keras.layers.Input([length], dtype="int32")
    x = keras.layers.Embedding(words, width, dtype=policy)(tokens)
    for _ in range(layers):
        y = keras.layers.LayerNormalization(dtype=policy)(x)
        y = keras.layers.MultiHeadAttention(heads, width // heads, dtype=policy)(y, y)
        x = keras.layers.Add(dtype=policy)([x, y])
        y = keras.layers.LayerNormalization(dtype=policy)(x)
        y = keras.layers.Dense(4 * width, activation="gelu", dtype=policy)(y)
        x = keras.layers.Add(dtype=policy)([x, keras.layers.Dense(width, dtype=policy)(y)])
    x = keras.layers.LayerNormalization(dtype=policy)(x)
    logits = keras.layers.Dense(words, dtype=policy)(x)
    rng = np.random.default_rng(0)
    batch = tuple(tf.constant(rng.integers(0, words, (batch_size, length)), tf.int32) for _ in range(2))
    return Problem(keras.Model(tokens, logits), cross_entropy, batch)


def resnet(policy: str, *, filters=(64, 128, 256, 512), size=64, batch_size=64) -> Problem:
    """Residual blocks with BatchNorm, two for each number of filters, on random images."""

    def convolution(x, count, strides=1, relu=True):
        x = keras.layers.Conv2D(count, 3, strides, "same", use_bias=False, dtype=policy)(x)
        x = keras.layers.BatchNormalization(dtype=policy)(x)
        return keras.layers.ReLU(dtype=policy)(x) if relu else x

    images = keras.layers.Input([size, size, 3])
    x = convolution(images, filters[0])
    for index, count in enumerate(filters):
        for strides in (1 if index == 0 else 2, 1):
            y = convolution(convolution(x, count, strides), count, relu=False)
            if x.shape != y.shape:
                x = keras.layers.Conv2D(count, 1, strides, use_bias=False, dtype=policy)(x)
            x = keras.layers.ReLU(dtype=policy)(keras.layers.Add(dtype=policy)([x, y]))
    logits = keras.layers.Dense(10, dtype=policy)(keras.layers.GlobalAveragePooling2D(dtype=policy)(x))
    rng = np.random.default_rng(0)
    pixels = tf.constant(rng.standard_normal((batch_size, size, size, 3), np.float32))
    labels = tf.constant(rng.integers(0, 10, batch_size), tf.int32)
    return Problem(keras.Model(images, logits), cross_entropy, (pixels, labels))


def tiny(policy: str) -> Problem:
    """Two dense layers with BatchNorm, which are traced in no time."""
    inner = [keras.layers.Dense(4, dtype=policy), keras.layers.BatchNormalization(dtype=policy)]
    model = keras.Sequential([keras.layers.Input([4]), *inner, keras.layers.Dense(3, dtype=policy)])
    return Problem(model, cross_entropy, (tf.ones([8, 4]), tf.zeros([8], tf.int32)))
