"""Small problems whose runs are replayed and repeated, each with its seed: model, loss, optimizer and batches.

`TUNED_ON` are those with which the intervals were made. No run of `HELD_OUT` was looked at before. After that a step
close to its limit counted as one that may differ, and `CHECKED` was measured.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import loops
import loops.tasks
import scaler

POLICY = "mixed_float16"


def mlp(seed: int) -> tuple:
    """Two dense layers on digits, with Adam."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu")]
    return _digits(layers, keras.optimizers.Adam(1e-2), seed)


def autoencoder(seed: int) -> tuple:
    """Digits through a bottleneck, with SGD."""
    images = loops.tasks.load("digits").images.reshape(-1, 64)
    layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(8), keras.layers.Dense(32, "tanh")]
    model = keras.Sequential([keras.Input([64]), *layers, keras.layers.Dense(64), _float32()])
    return model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.5), _batches(images, images, seed)


def gru(seed: int) -> tuple:
    """An unrolled recurrent network that reads digits row by row, with Adam."""
    return _digits([keras.layers.Reshape([8, 8]), keras.layers.GRU(24, unroll=True)], keras.optimizers.Adam(5e-3), seed)


def attention(seed: int) -> tuple:
    """One block of attention over the rows of digits, with Adam and a warm start of the learning rate."""
    rows = keras.Input([8, 8, 1])
    x = keras.layers.Dense(24)(keras.layers.Reshape([8, 8])(rows))
    y = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 12)(y, y)])
    x = keras.layers.Dense(48, "gelu")(keras.layers.LayerNormalization()(x))
    logits = keras.layers.Activation("linear", dtype="float32")(keras.layers.Dense(10)(keras.layers.Flatten()(x)))
    schedule = keras.optimizers.schedules.PolynomialDecay(1e-3, 150, 5e-3)
    task = loops.tasks.load("digits")
    return keras.Model(rows, logits), task.loss, keras.optimizers.Adam(schedule), task.dataset(32, seed)


def cnn(seed: int) -> tuple:
    """Convolutions with BatchNorm on digits, with momentum."""
    block = [keras.layers.Conv2D(12, 3, 2, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    return _digits([*block, keras.layers.Flatten()], keras.optimizers.SGD(0.05, momentum=0.9), seed)


def heavy_tails(seed: int) -> tuple:
    """A regression whose inputs and errors have Student's distribution with 3 degrees of freedom, with RMSprop."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, [2048, 16]).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=[16, 1]) / 4) + 0.3 * rng.standard_t(3, [2048, 1])
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(32, "relu"), keras.layers.Dense(1), _float32()]
    model = keras.Sequential([keras.Input([16]), *layers])
    return model, keras.losses.MeanSquaredError(), keras.optimizers.RMSprop(2e-3), _batches(x, y, seed)


def residual(seed: int) -> tuple:
    """Dense layers with LayerNorm and skip connections on digits, with Nesterov's momentum."""
    images = keras.Input([8, 8, 1])
    x = keras.layers.Dense(48)(keras.layers.Flatten()(images))
    for _ in range(2):
        y = keras.layers.Dense(48, "silu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, y])
    logits = _float32()(keras.layers.Dense(10)(x))
    task = loops.tasks.load("digits")
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True)
    return keras.Model(images, logits), task.loss, optimizer, task.dataset(32, seed)


def waves(seed: int) -> tuple:
    """Two convolutions over time that read the frequency of a noisy wave, with AdamW."""
    rng = np.random.default_rng(1)
    rate, phase = rng.uniform(0.2, 2.0, [2048, 1]), rng.uniform(0, 6.3, [2048, 1])
    x = (np.sin(rate * np.arange(32) + phase) + 0.3 * rng.normal(size=[2048, 32])).astype(np.float32)
    layers = [keras.layers.Conv1D(16, 5, activation="relu"), keras.layers.Conv1D(16, 5, 2, activation="relu")]
    ends = [keras.layers.Flatten(), keras.layers.Dense(1), _float32()]
    model = keras.Sequential([keras.Input([32]), keras.layers.Reshape([32, 1]), *layers, *ends])
    return model, keras.losses.MeanSquaredError(), keras.optimizers.AdamW(3e-3), _batches(x, rate, seed)


TUNED_ON: tuple[Callable[[int], tuple], ...] = (mlp, autoencoder)
HELD_OUT: tuple[Callable[[int], tuple], ...] = (gru, attention, cnn, heavy_tails)
CHECKED: tuple[Callable[[int], tuple], ...] = (residual, waves)


def loop_of(problem: Callable[[int], tuple], seed: int, strategy: scaler.Strategy, actions: list) -> loops.Loop:
    """The loop of a problem before its first step; the same for the same seed."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(POLICY)
    model, loss, optimizer, dataset = problem(seed)
    step = loops.TrainStep(
        model, loss, optimizer, loss_scaler=scaler.LossScaler(strategy), probes=scaler.observe.watch(model)
    )
    return loops.Loop(step, dataset, steps_per_call=50, actions=actions)


def _digits(layers: list, optimizer: keras.optimizers.Optimizer, seed: int) -> tuple:
    task = loops.tasks.load("digits")
    model = keras.Sequential([keras.Input([8, 8, 1]), *layers, keras.layers.Dense(10), _float32()])
    return model, task.loss, optimizer, task.dataset(32, seed)


def _float32() -> keras.layers.Layer:
    return keras.layers.Activation("linear", dtype="float32")


def _batches(x: np.ndarray, y: np.ndarray, seed: int) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((x, y.astype(np.float32)))
    return data.shuffle(len(x), seed=seed, reshuffle_each_iteration=True).repeat().batch(32, drop_remainder=True)
