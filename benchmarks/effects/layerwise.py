"""A scale for each layer against one for all: what float16 makes zero in a deep network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent, spread

NAME = "layerwise"
_DEPTH = 20
_HIGHEST = 30
_WAYS = ("no scale", "best single scale", "a scale for each layer")


def run(seeds: int = 3, steps: int = 40, depth: int = _DEPTH) -> Effect:
    """Compares zeros in the gradients of the weights of a deep sigmoid network, whose weights stay as initialized.

    Args:
        seeds: The number of networks.
        steps: The number of batches; the second half is counted.
        depth: The number of sigmoid layers.
    """
    problem = networks.digits()
    wide, narrow = _network(depth, "float32"), _network(depth, "float16")
    rescaled, scales = scaler.layerwise.insert_rescales(narrow, [f"layer_{number}" for number in range(1, depth + 1)])
    at_start = [variable.numpy() for variable in scales.variables]
    exact, single, adaptive = _plain(wide), _plain(narrow), _adaptive(rescaled, narrow, scales)
    lost = np.zeros([len(_WAYS), depth + 1, seeds])
    best, skipped, log_amax, chosen = [], [], [], []
    for seed in range(seeds):
        _initialize(seed, wide, narrow)
        for variable, value in zip(scales.variables, at_start, strict=True):
            variable.assign(value)
        batches = [_batch(problem, seed, step) for step in range(steps)]
        counted = batches[len(batches) // 2 :]
        references = [exact(*batch, tf.constant(1.0)) for batch in counted]
        best.append(_largest_safe(single, batches))
        seen = [adaptive(*batch) for batch in batches]
        found = (
            [single(*batch, tf.constant(1.0)) for batch in counted],
            [single(*batch, tf.constant(2.0 ** best[-1])) for batch in counted],
            [grads for grads, _ in seen[len(batches) // 2 :]],
        )
        lost[:, :, seed] = [_flushed(each, references) for each in found]
        skipped.append(sum(not bool(finite) for _, finite in seen))
        log_amax.append(np.mean([[np.log2(np.abs(g).max()) for g in grads] for grads in references], axis=0))
        chosen.append(
            [dict(zip(scales.names, np.log2(scales.scales), strict=True)).get(name, 0) for name in _names(depth)]
        )
    layers = np.arange(1, depth + 2)
    octaves = np.array(log_amax)
    _, one, own = lost
    return Effect(
        **described(
            NAME,
            depth=depth,
            best=", ".join(f"2^{exponent}" for exponent in best),
            own=100 * own[0].mean(),
            one=100 * one[0].mean(),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "zeros in layer 1, best single scale and a scale for each layer",
                "–",
                f"{percent(one[0], '.2f')} and {percent(own[0], '.2f')}",
            ),
        ),
        columns=("layer", "log2 of its largest gradient", "log2 of its own scale", *(f"zero, {way}" for way in _WAYS)),
        rows=tuple(
            (
                "logits" if at == depth else f"{at + 1}",
                spread(octaves[:, at], ".1f"),
                spread(np.array(chosen)[:, at], ".0f"),
                *(percent(lost[way, at], ".2f") for way in range(len(_WAYS))),
            )
            for at in range(depth + 1)
        ),
        claims=(
            Claim(
                "in layer 1 a scale for each layer flushes less than the best single one.",
                bool((own[0] < one[0]).all()),
            ),
            Claim(
                f"so it does on average over all layers ({percent(own.mean(axis=0), '.2f')} and "
                f"{percent(one.mean(axis=0), '.2f')}).",
                bool((own.mean(axis=0) < one.mean(axis=0)).all()),
            ),
            Claim("it finds its scales without skipping a step.", max(skipped) == 0, published=False),
            Claim("no layer is worse off with its own scale.", bool((own <= one + 1e-9).all()), published=False),
            Claim(
                f"one scale cannot serve all: layers are {np.ptp(octaves, axis=1).mean():.0f} octaves apart, float16 "
                "has 40, and some layer loses more than half.",
                bool((one.max(axis=0) > 0.5).all()),
            ),
        ),
        panels=(
            Panel(
                "gradients of kernels flushed",
                "layer, from the input",
                "share",
                tuple(curve(way, layers, lost[at]) for at, way in enumerate(_WAYS)),
            ),
            Panel(
                "size of gradients and scales",
                "layer, from the input",
                "log2",
                (
                    curve("largest gradient", layers, octaves.T),
                    curve("its own scale", layers, np.array(chosen).T),
                ),
            ),
        ),
        measured={
            f"zero {way} layer {at + 1}": lost[number, at].tolist()
            for at in range(depth + 1)
            for number, way in enumerate(_WAYS)
        }
        | {"best single log2 scale": [float(exponent) for exponent in best], "skipped": [float(n) for n in skipped]},
    )


def _names(depth: int) -> list[str]:
    return [*(f"layer_{number}" for number in range(1, depth + 1)), "outputs"]


def _network(depth: int, dtype: str) -> keras.Model:
    x = inputs = keras.Input([64], dtype=dtype)
    for number in range(1, depth + 1):
        x = keras.layers.Dense(64, activation="sigmoid", dtype=dtype, name=f"layer_{number}")(x)
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


def _plain(model: keras.Model) -> Callable[..., list[tf.Tensor]]:
    @tf.function
    def gradients(images: tf.Tensor, labels: tf.Tensor, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            scaled = _loss(model, images, labels) * loss_scale
        return tape.gradient(scaled, _kernels(model))

    return gradients


def _adaptive(rescaled: keras.Model, model: keras.Model, scales: Any) -> Callable[..., tuple[list, tf.Tensor]]:
    @tf.function
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[list, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = _loss(rescaled, images, labels)
        grads, seen = scales.gradient(tape, loss, _kernels(model))
        scales.update(seen)
        return grads, scaler.all_finite(grads)

    return gradients


def _largest_safe(single: Callable[..., list[tf.Tensor]], batches: Sequence[tuple]) -> int:
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


EXPERIMENT = Experiment(NAME, "a scale for each layer against one for all", 40, run)
