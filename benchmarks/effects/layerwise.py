"""A scale for each layer against one for all: what float16 makes zero in a deep network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, curves, flat

_DEPTH = 20
_LAYERS = [f"layer_{number}" for number in range(1, _DEPTH + 1)]
_HIGHEST = 30
_WAYS = ("no scale", "best single scale", "a scale for each layer")

Gradients = Callable[..., list[tf.Tensor]]


def run(seeds: int, steps: int) -> Found:
    """Compares zeros in the gradients of the weights of a deep sigmoid network, whose weights stay as initialized.

    Args:
        seeds: The number of networks.
        steps: The number of batches; the second half is counted.
    """
    problem = networks.digits()
    wide, narrow = _network("float32"), _network("float16")
    rescaled, scales = scaler.layerwise.insert_rescales(narrow, _LAYERS)
    at_start = [variable.numpy() for variable in scales.variables]
    exact, single = _plain(wide), _plain(narrow)

    @tf.function
    def adaptive(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = _loss(rescaled, images, labels)
        grads, seen = scales.gradient(tape, loss, _kernels(narrow))
        scales.update(seen)
        return grads

    lost = np.zeros([len(_WAYS), _DEPTH + 1, seeds])
    octaves, chosen = np.zeros([2, _DEPTH + 1, seeds])
    best, skipped = [], []
    for seed in range(seeds):
        _initialize(seed, wide, narrow)
        for variable, value in zip(scales.variables, at_start, strict=True):
            variable.assign(value)
        batches = [_batch(problem, seed, step) for step in range(steps)]
        counted = slice(steps // 2, None)
        references = [exact(*batch, tf.constant(1.0)) for batch in batches[counted]]
        best.append(_largest_safe(single, batches))
        own = [adaptive(*batch) for batch in batches]
        fixed = ([single(*batch, tf.constant(2.0**at)) for batch in batches[counted]] for at in (0, best[-1]))
        lost[:, :, seed] = [_flushed(each, references) for each in (*fixed, own[counted])]
        skipped.append(sum(not bool(scaler.all_finite(grads)) for grads in own))
        octaves[:, seed] = np.mean([[np.log2(np.abs(g).max()) for g in grads] for grads in references], axis=0)
        found = dict(zip(scales.names, np.log2(scales.scales), strict=True))
        chosen[:, seed] = [found.get(name, 0) for name in (*_LAYERS, "outputs")]
    layers = range(1, _DEPTH + 2)
    _, one, own = lost
    return Found(
        words={
            "best": ", ".join(f"2^{exponent}" for exponent in best),
            "first_own": own[0].mean(),
            "first_one": one[0].mean(),
            "own": own,
            "one": one,
            "mean_own": own.mean(axis=0),
            "mean_one": one.mean(axis=0),
            "apart": np.ptp(octaves, axis=0).mean(),
        },
        rows=(
            ("logits" if at == _DEPTH else f"{at + 1}", octaves[at], chosen[at], *lost[:, at])
            for at in range(_DEPTH + 1)
        ),
        holds={
            "first": own[0] < one[0],
            "average": own.mean(axis=0) < one.mean(axis=0),
            "skips": max(skipped) == 0,
            "worse": own <= one + 1e-9,
            "apart": one.max(axis=0) > 0.5,
        },
        lines=[
            curves(layers, dict(zip(_WAYS, lost, strict=True))),
            curves(layers, {"largest gradient": octaves, "its own scale": chosen}),
        ],
        measured=flat({f"zero {way} layer": each for way, each in zip(_WAYS, lost, strict=True)}, layers)
        | {"best single log2 scale": [float(exponent) for exponent in best], "skipped": [float(n) for n in skipped]},
    )


def _network(dtype: str) -> keras.Model:
    x = inputs = keras.Input([64], dtype=dtype)
    for name in _LAYERS:
        x = keras.layers.Dense(64, activation="sigmoid", dtype=dtype, name=name)(x)
    return keras.Model(inputs, keras.layers.Dense(10, dtype=dtype, name="logits")(x))


def _initialize(seed: int, *models: keras.Model) -> None:
    """Gives all models the same float16 weights, drawn as Keras does."""
    random = np.random.default_rng(seed)
    values = []
    for shape in (variable.shape for variable in models[0].trainable_variables):
        limit = np.sqrt(6 / sum(shape))
        values.append(random.uniform(-limit, limit, shape).astype(np.float16) if len(shape) > 1 else np.zeros(shape))
    for model in models:
        model.set_weights(values)


def _batch(problem: networks.Problem, seed: int, step: int) -> tuple[tf.Tensor, tf.Tensor]:
    at = np.random.default_rng([seed, step]).integers(len(problem.labels), size=networks.BATCH)
    return tf.gather(problem.images, at), tf.gather(problem.labels, at)


def _kernels(model: keras.Model) -> list:
    return [variable for variable in model.trainable_variables if len(variable.shape) > 1]


def _loss(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = tf.cast(model(images), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _plain(model: keras.Model) -> Gradients:
    @tf.function
    def gradients(images: tf.Tensor, labels: tf.Tensor, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            scaled = _loss(model, images, labels) * loss_scale
        return tape.gradient(scaled, _kernels(model))

    return gradients


def _largest_safe(single: Gradients, batches: Sequence[tuple]) -> int:
    """The exponent of the largest scale at which no step overflows."""
    exponent = _HIGHEST
    while not all(bool(scaler.all_finite(single(*batch, tf.constant(2.0**exponent)))) for batch in batches):
        exponent -= 1
    return exponent


def _flushed(grads: Sequence[Sequence[tf.Tensor]], references: Sequence[Sequence[tf.Tensor]]) -> np.ndarray:
    """By layer, the share of the elements that are not zero in `references` that are zero in `grads`."""
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(grads, references, strict=True)]
    lost = [[np.sum((own.numpy() == 0) & (exact.numpy() != 0)) for own, exact in one] for one in pairs]
    there = [[np.count_nonzero(exact.numpy()) for _, exact in one] for one in pairs]
    return np.sum(lost, axis=0) / np.maximum(np.sum(there, axis=0), 1)
