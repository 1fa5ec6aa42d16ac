"""Long sums in a short accumulator: in order, in chunks, and at random, over the products of real gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects.effect import Found, curves, flat
from benchmarks.effects.runs import trained
from loops import tasks

CHUNK = 64
WAYS = ("in order", "chunks", "at random")
_OPERANDS = "float8_e5m2"
FORMATS = ("float16", "bfloat16")
_CASES = list(itertools.product(FORMATS, WAYS))
_BATCH = 256
_LONGEST = _BATCH * 64
"""Products: an image has 64 positions in the first convolution."""
_LENGTHS = CHUNK * 2 ** np.arange(int(np.log2(_LONGEST // CHUNK)) + 1)
_RATE = 1e-3
_TOP = 14
"""The exponent of the power of two below which the largest sum of magnitudes is scaled: float16 holds 2^15."""
TERMS = ("as they are", "without signs")
_CLOSE = 0.05
"""The error of a gradient, as a share of its norm, that is small here: that of another batch differs by far more."""
_LESS = 0.1
"""The part of the error of a plain sum that is left where it is cured. Both are yardsticks of this page's own."""
_PROGRESS = 0.01
"""The share of the loss that a step along the exact gradient is to take away, to first order."""

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class _Seen(NamedTuple):
    """What one trained network shows.

    Attributes:
        error: By terms, format and way: the error of the sums so far, as a share of their norm, at each of `_LENGTHS`.
        gradient: By format and way: the error of the whole gradient of the kernels, as a share of its norm.
        progress: By format and way: what a step along the summed gradient lowers the loss by, as a share of what one
            along the exact gradient does.
        noise: How far the gradient of another batch is, as a share of its norm.
    """

    error: dict[tuple[str, str, str], np.ndarray]
    gradient: dict[tuple[str, str], float]
    progress: dict[tuple[str, str], float]
    noise: float


def run(seeds: int, steps: int) -> Found:
    """Trains the digits' CNN in float32, and sums the products of one step's kernel gradients in short formats.

    Args:
        seeds: The number of networks.
        steps: The steps of training before that step.
    """
    sums = {case: summation(*case) for case in _CASES}
    seen = [_measure(seed, steps, sums) for seed in range(seeds)]
    error = {key: np.array([one.error[key] for one in seen]) for key in seen[0].error}
    gradient, progress = (
        {case: np.array([getattr(one, part)[case] for one in seen]) for case in _CASES}
        for part in ("gradient", "progress")
    )
    noise = np.array([one.noise for one in seen])
    last = {key: values[:, -1] for key, values in error.items()}
    products, magnitudes = ({case: last[(terms, *case)] for case in _CASES} for terms in TERMS)
    shown = {"products": products, "magnitudes": magnitudes, "gradient": gradient}
    float16, bfloat16 = ({way: gradient[name, way] for way in WAYS} for name in FORMATS)
    return Found(
        words={
            "chunks": _LONGEST // CHUNK,
            "ordered": {name: gradient[name, "in order"].mean() for name in FORMATS},
            "chunked": {name: gradient[name, "chunks"].mean() for name in FORMATS},
            "float16": float16,
            "bfloat16": bfloat16,
            "noise": noise,
            "left": {" ".join(case): each / magnitudes[case[0], "in order"] for case, each in magnitudes.items()},
            "lower": {name: gradient[name, "in order"] / gradient[name, "chunks"] for name in FORMATS},
            "cases": [" ".join(case) for case in _CASES],
        },
        rows=((*case, *(each[case] for each in (*shown.values(), progress))) for case in _CASES),
        holds=holds_of(error, gradient, noise),
        lines=[
            *(curves(_LENGTHS, {way: error[TERMS[1], name, way].T for way in WAYS}) for name in FORMATS),
            curves(range(len(_CASES)), {what: list(each.values()) for what, each in shown.items()}),
        ],
        measured=flat({"gradient": gradient, "progress": progress, "error": last, "noise": noise}),
    )


def holds_of(
    error: Mapping[tuple[str, str, str], np.ndarray], gradient: Mapping[tuple[str, str], np.ndarray], noise: np.ndarray
) -> dict[str, Any]:
    """Whether each claim holds: `error` is [seeds, lengths], the others [seeds]."""
    plain = {name: error[TERMS[1], name, "in order"] for name in FORMATS}
    return {
        "swamped": [(each[:, -1] > np.maximum(0.1, each[:, 0])).all() for each in plain.values()],
        **{
            f"{key}-{name}": error[TERMS[1], name, way][:, -1] / plain[name][:, -1] < _LESS
            for key, way in (("chunks", "chunks"), ("random", "at random"))
            for name in FORMATS
        },
        "lower": [gradient[name, "chunks"] < gradient[name, "in order"] for name in FORMATS],
        "close": [gradient[name, "chunks"] <= _CLOSE for name in FORMATS],
        "noise": max(values.max() for values in gradient.values()) < noise.min(),
    }


def _measure(seed: int, steps: int, sums: dict[tuple[str, str], Summation]) -> _Seen:
    task = tasks.load("digits")
    model = trained(task, seed, keras.optimizers.Adam(_RATE), steps).model
    batches = iter(task.dataset(_BATCH, seed + 1000))
    images, labels = next(batches)
    error: dict[tuple[str, str, str], np.ndarray] = {}
    summed: dict[tuple[str, str], list[np.ndarray]] = {case: [] for case in sums}
    exact: list[np.ndarray] = []
    for layer, (left, right) in enumerate(of_kernels(model, task.loss, images, labels)):
        # Powers of two change no bit of an operand, and keep the sums within float16.
        shift = 2.0 ** (_TOP - np.ceil(np.log2((np.abs(left).T @ np.abs(right)).max())))
        left, right = (scaler.formats.rounded(each, _OPERANDS, saturate=True).numpy() for each in (left, right * shift))
        exact.append(left.T.astype(np.float64) @ right / shift)
        for (name, way), sum_up in sums.items():
            so_far = sum_up(left, right, (seed, layer))
            summed[name, way].append(so_far[-1] / shift)
            if layer == 0:
                same_sign = np.abs(left), np.abs(right)
                error[TERMS[0], name, way] = _errors(left, right, so_far)
                error[TERMS[1], name, way] = _errors(*same_sign, sum_up(*same_sign, (seed, layer)))
    own, other = (gradients(model, task.loss, *each) for each in ((images, labels), next(batches)))
    return _Seen(
        error,
        {case: _distance(each, exact) for case, each in summed.items()},
        progress(model, task.loss, images, labels, exact, summed),
        _distance(other, own),
    )


def _errors(left: np.ndarray, right: np.ndarray, so_far: np.ndarray) -> np.ndarray:
    """The error of the sums at each of `_LENGTHS`, as a share of their norm."""
    exact = [left[:length].T.astype(np.float64) @ right[:length] for length in _LENGTHS]
    return np.array(
        [_distance([so_far[length // CHUNK - 1]], [true]) for length, true in zip(_LENGTHS, exact, strict=True)]
    )


def _distance(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The norm of the difference of two lists of arrays, as a share of that of the second."""
    one, other = (np.concatenate([np.ravel(each).astype(np.float64) for each in values]) for values in (some, others))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def convolutions(model: keras.Sequential) -> list[keras.layers.Conv2D]:
    """The convolutions of a model, in order."""
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]


def of_kernels(
    model: keras.Sequential, loss: Loss, images: tf.Tensor, labels: tf.Tensor
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The operands of each convolution's kernel gradient, in training.

    Args:
        model: Layers in a row. Its convolutions have no bias, and pad as "same".
        loss: Of labels and outputs.
        images: [batch, height, width, channels].
        labels: [batch].

    Returns:
        For each convolution what each position sees, float32 [n, kernel * channels], and the gradient of its output
        there, [n, filters], where n is the number of examples times positions. The gradient of the kernel is the sum
        over n of their products.
    """
    convolved = convolutions(model)
    inputs, outputs, given = [], [], images
    with tf.GradientTape() as tape:
        for layer in model.layers:
            if layer in convolved:
                inputs.append(given)
            given = layer(given, training=True) if isinstance(layer, keras.layers.BatchNormalization) else layer(given)
            if layer in convolved:
                outputs.append(given)
        value = loss(labels, given)
    deltas = tape.gradient(value, outputs)
    found = []
    for layer, seen, delta in zip(convolved, inputs, deltas, strict=True):
        patches = tf.image.extract_patches(seen, [1, *layer.kernel_size, 1], [1, *layer.strides, 1], [1] * 4, "SAME")
        found.append(tuple(each.numpy().reshape(-1, each.shape[-1]) for each in (patches, delta)))
    return found


def gradients(model: keras.Sequential, loss: Loss, images: tf.Tensor, labels: tf.Tensor) -> list[np.ndarray]:
    """The gradients of the convolutions' kernels in training, each [kernel * channels, filters]."""
    kernels = [layer.kernel for layer in convolutions(model)]
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    found = tape.gradient(value, [kernel.value for kernel in kernels])
    return [each.numpy().reshape(-1, each.shape[-1]) for each in found]


def progress(
    model: keras.Sequential,
    loss: Loss,
    images: tf.Tensor,
    labels: tf.Tensor,
    exact: Sequence[np.ndarray],
    summed: Mapping[tuple[str, str], Sequence[np.ndarray]],
) -> dict[tuple[str, str], float]:
    """How much a step along each gradient lowers the loss, as a share of what one along the exact gradient does.

    Args:
        model: The network; the kernels of its convolutions move, and are put back.
        loss: Of labels and outputs.
        images: A batch.
        labels: Its labels.
        exact: The gradients of the kernels, each [kernel * channels, filters].
        summed: The same from other sums.
    """
    kernels = [layer.kernel for layer in convolutions(model)]
    before = [keras.ops.convert_to_numpy(kernel) for kernel in kernels]
    start = float(loss(labels, model(images, training=True)))
    rate = _PROGRESS * start / sum(float((each.astype(np.float64) ** 2).sum()) for each in exact)

    def lowered(gradients: Sequence[np.ndarray]) -> float:
        for kernel, old, gradient in zip(kernels, before, gradients, strict=True):
            kernel.assign(old - rate * gradient.reshape(old.shape))
        return start - float(loss(labels, model(images, training=True)))

    best = lowered(exact)
    found = {case: lowered(sums) / best for case, sums in summed.items()}
    for kernel, old in zip(kernels, before, strict=True):
        kernel.assign(old)
    return found


Summation = Callable[[np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]


def summation(format: str, way: str) -> Summation:
    """Sums the outer products of rows; each sum is rounded after each addition.

    Products are float32: they are exact where both operands have few bits.

    Args:
        format: The accumulator's, as `scaler.formats.rounded` names it.
        way: "in order": each product is added to the sum, rounded to nearest. "chunks": those of a chunk are added by
            themselves, and then their sum to the sum, all rounded to nearest. "at random": in order, rounded at random.

    Returns:
        A function of float32 [n, i] and [n, j], where n is a multiple of `CHUNK`, and two integers that determine what
        is drawn. It returns the sums so far after each chunk, float32 [n / CHUNK, i, j].
    """

    def add(left: tf.Tensor, right: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        if way == "chunks":
            return _across(_within(left, right, format), format)
        return _ordered(left, right, format, seed if way == "at random" else None)

    rows = tf.TensorSpec([None, CHUNK, None], tf.float32)
    # Traced once for all shapes, explicitly: TensorFlow warns about functions that calls trace repeatedly.
    traced = tf.function(add, autograph=True).get_concrete_function(rows, rows, tf.TensorSpec([2], tf.int32))

    def sums(left: np.ndarray, right: np.ndarray, seed: tuple[int, int]) -> np.ndarray:
        chunked = [tf.constant(each.reshape(-1, CHUNK, each.shape[1]), tf.float32) for each in (left, right)]
        return traced(*chunked, tf.constant(seed, tf.int32)).numpy()

    return sums


def _within(left: tf.Tensor, right: tf.Tensor, format: str) -> tf.Tensor:
    """The sum of each chunk [chunks, i, j], all chunks at once."""
    total = tf.zeros([tf.shape(left)[0], tf.shape(left)[2], tf.shape(right)[2]])
    for row in tf.range(CHUNK):
        product = left[:, row, :, None] * right[:, row, None, :]
        total = scaler.formats.rounded(total + product, format)
    return total


def _across(chunks: tf.Tensor, format: str) -> tf.Tensor:
    """The sum of the chunks so far, after each."""
    total, count = tf.zeros_like(chunks[0]), tf.shape(chunks)[0]
    rows = tf.TensorArray(tf.float32, count)
    for chunk in tf.range(count):
        total = scaler.formats.rounded(total + chunks[chunk], format)
        rows = rows.write(chunk, total)
    return rows.stack()


def _ordered(left: tf.Tensor, right: tf.Tensor, format: str, seed: tf.Tensor | None) -> tf.Tensor:
    """The sum of the products so far, after each chunk of them."""
    total, count = tf.zeros([tf.shape(left)[2], tf.shape(right)[2]]), tf.shape(left)[0]
    rows = tf.TensorArray(tf.float32, count)
    for chunk in tf.range(count):
        for row in tf.range(CHUNK):
            product = left[chunk, row, :, None] * right[chunk, row, None, :]
            drawn = None if seed is None else seed * 2**20 + tf.stack([chunk, row])
            total = scaler.formats.rounded(total + product, format, seed=drawn)
        rows = rows.write(chunk, total)
    return rows.stack()
