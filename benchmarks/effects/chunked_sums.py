"""Long sums in a short accumulator: in order, in chunks, and at random, over the products of real gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

import scaler
from benchmarks.effects import operands
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent, spread
from benchmarks.effects.sums import CHUNK, WAYS, Summation, summation
from loops import tasks
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep

NAME = "chunked-sums"
_OPERANDS = "float8_e5m2"
_FORMATS = ("float16", "bfloat16")
_PUBLISHED = ("float16",)
"""What published accumulators have something to say about: nothing is published for a fraction of 7 bits."""
_BATCH = 256
_POSITIONS = 64
"""Of an image in the first convolution."""
_LENGTHS = CHUNK * 2 ** np.arange(int(np.log2(_BATCH * _POSITIONS // CHUNK)) + 1)
_RATE = 1e-3
_TOP = 14
"""The exponent of the power of two below which the largest sum of magnitudes is scaled: float16 holds 2^15."""
_TERMS = ("as they are", "without signs")
_CLOSE = 0.05
"""The error of a gradient, as a share of its norm, that is small here: that of another batch differs by far more."""
_LESS = 0.1
"""The part of the error of a plain sum that is left where it is cured. Both are yardsticks of this page's own."""


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


def run(seeds: int = 5, steps: int = 100) -> Effect:
    """Trains the digits' CNN in float32, and sums the products of one step's kernel gradients in short formats.

    Args:
        seeds: The number of networks.
        steps: The steps of training before that step.
    """
    cases = list(itertools.product(_FORMATS, WAYS))
    sums = {case: summation(*case) for case in cases}
    seen = [_measure(seed, steps, sums) for seed in range(seeds)]
    error = {key: np.array([one.error[key] for one in seen]) for key in seen[0].error}
    gradient = {case: np.array([one.gradient[case] for one in seen]) for case in cases}
    progress = {case: np.array([one.progress[case] for one in seen]) for case in cases}
    noise = np.array([one.noise for one in seen])
    last = {key: values[:, -1] for key, values in error.items()}
    magnitudes = {(name, way): last[_TERMS[1], name, way] for name, way in cases}
    return Effect(
        **described(
            NAME,
            rate=_RATE,
            batch=_BATCH,
            chunk=CHUNK,
            products=9 * 16,
            longest=_LENGTHS[-1],
            chunks=_LENGTHS[-1] // CHUNK,
            gradient_ordered=_means(gradient, "in order"),
            gradient_chunks=_means(gradient, "chunks"),
            noise=percent(noise, ".0f"),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "a 16-bit accumulator with chunks",
                "full accuracy in training",
                f"error of the gradient {percent(gradient['float16', 'chunks'], '.2f')} in float16, "
                f"{percent(gradient['bfloat16', 'chunks'], '.2f')} in bfloat16",
            ),
            (
                "and without them",
                "no figure compared",
                f"{percent(gradient['float16', 'in order'], '.2f')} and "
                f"{percent(gradient['bfloat16', 'in order'], '.2f')}",
            ),
        ),
        columns=(
            "accumulator",
            "sum",
            f"error of {_LENGTHS[-1]} products",
            "of their magnitudes",
            "error of the gradient",
            "progress of a step",
        ),
        rows=tuple(
            (
                name,
                way,
                percent(last[_TERMS[0], name, way], ".2f"),
                percent(last[_TERMS[1], name, way], ".2f"),
                percent(gradient[name, way], ".2f"),
                percent(progress[name, way], ".2f"),
            )
            for name, way in cases
        ),
        claims=_claims(error, gradient, noise),
        panels=(
            *(
                Panel(
                    f"sums of magnitudes in {name}",
                    "products added",
                    "error, share of the norm",
                    tuple(curve(way, _LENGTHS, error[_TERMS[1], name, way].T) for way in WAYS),
                    log_x=2,
                    log_y=10,
                )
                for name in _FORMATS
            ),
            Panel(
                f"error of {_LENGTHS[-1]}, and of a gradient",
                "",
                "share of the norm",
                tuple(
                    curve(what, range(len(cases)), np.array([values[case] for case in cases]))
                    for what, values in (
                        ("products", {(name, way): last[_TERMS[0], name, way] for name, way in cases}),
                        ("magnitudes", magnitudes),
                        ("gradient", gradient),
                    )
                ),
                log_y=10,
                reference=(float(noise.mean()), "another batch"),
                ticks=tuple(map(" ".join, cases)),
            ),
        ),
        measured={
            f"{kind} {name} {way}": values[name, way].tolist()
            for kind, values in (("gradient", gradient), ("progress", progress))
            for name, way in cases
        }
        | {f"error {' '.join(key)}": values.tolist() for key, values in last.items()}
        | {"noise": noise.tolist()},
    )


def _claims(
    error: dict[tuple[str, str, str], np.ndarray],
    gradient: dict[tuple[str, str], np.ndarray],
    noise: np.ndarray,
) -> tuple[Claim, ...]:
    """What is claimed: `error` is [seeds, lengths], the others [seeds]."""
    same = {(name, way): error[_TERMS[1], name, way] for name in _FORMATS for way in WAYS}
    chunked, ordered, drawn = (
        {name: gradient[name, way] for name in _FORMATS} for way in ("chunks", "in order", "at random")
    )
    largest = max(values.max() for way in (ordered, chunked, drawn) for values in way.values())
    return (
        Claim(
            "products of one sign are swamped: in each seed the error of a plain sum exceeds a tenth at "
            "the greatest length, and is less at the least.",
            all(
                bool((same[name, "in order"][:, -1] > np.maximum(0.1, same[name, "in order"][:, 0])).all())
                for name in _FORMATS
            ),
        ),
        *(
            _cured(f"{name}: {said}", same[name, way][:, -1] / same[name, "in order"][:, -1], name in _PUBLISHED)
            for way, said in (("chunks", f"chunks of {CHUNK} leave"), ("at random", "rounding at random leaves"))
            for name in _FORMATS
        ),
        Claim(
            "in each seed chunks lower the error of the real gradient, by factors of "
            + " and ".join(f"{spread(ordered[name] / chunked[name], '.1f')} in {name}" for name in _FORMATS)
            + ".",
            all(bool((chunked[name] < ordered[name]).all()) for name in _FORMATS),
        ),
        Claim(
            f"in each seed the gradient with chunks is within {100 * _CLOSE:.0f} % of the exact one, in both formats.",
            all(bool((chunked[name] <= _CLOSE).all()) for name in _FORMATS),
            published=False,
        ),
        Claim(
            "each of these errors is smaller than the noise of the batch, in one step.",
            bool(largest < noise.min()),
            published=False,
        ),
    )


def _cured(said: str, part: np.ndarray, published: bool) -> Claim:
    """That little is left of an error: these parts of it, [seeds]."""
    return Claim(
        f"{said} less than {_LESS:g} of that error in each seed ({spread(part, '.3f')}).",
        bool((part < _LESS).all()),
        published,
    )


def _means(errors: dict[tuple[str, str], np.ndarray], way: str) -> str:
    """The mean errors of both formats."""
    return " and ".join(f"{100 * errors[name, way].mean():.2f} % in {name}" for name in _FORMATS)


def _measure(seed: int, steps: int, sums: dict[tuple[str, str], Summation]) -> _Seen:
    keras.utils.set_random_seed(seed)
    task = tasks.load("digits")
    model = task.model("float32")
    step = TrainStep(model, task.loss, keras.optimizers.Adam(_RATE), loss_scaler=scaler.LossScaler(scaler.NoScaling()))
    Loop(step, task.dataset(task.batch_size, seed), steps_per_call=min(20, steps)).run(steps)
    batches = iter(task.dataset(_BATCH, seed + 1000))
    images, labels = next(batches)
    error: dict[tuple[str, str, str], np.ndarray] = {}
    summed: dict[tuple[str, str], list[np.ndarray]] = {case: [] for case in sums}
    exact: list[np.ndarray] = []
    for layer, (left, right) in enumerate(operands.of_kernels(model, task.loss, images, labels)):
        # Powers of two change no bit of an operand, and keep the sums within float16.
        shift = 2.0 ** (_TOP - np.ceil(np.log2((np.abs(left).T @ np.abs(right)).max())))
        left, right = (scaler.formats.rounded(each, _OPERANDS, saturate=True).numpy() for each in (left, right * shift))
        exact.append(left.T.astype(np.float64) @ right / shift)
        for (name, way), sum_up in sums.items():
            so_far = sum_up(left, right, (seed, layer))
            summed[name, way].append(so_far[-1] / shift)
            if layer == 0:
                same_sign = np.abs(left), np.abs(right)
                error[_TERMS[0], name, way] = _errors(left, right, so_far)
                error[_TERMS[1], name, way] = _errors(*same_sign, sum_up(*same_sign, (seed, layer)))
    own, other = (operands.gradients(model, task.loss, *each) for each in ((images, labels), next(batches)))
    return _Seen(
        error,
        {case: _distance(each, exact) for case, each in summed.items()},
        operands.progress(model, task.loss, images, labels, exact, summed),
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


EXPERIMENT = Experiment(NAME, "sums of long products in 16 bits: in order, in chunks, at random", 100, run, seeds=5)
