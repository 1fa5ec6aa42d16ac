"""The share of gradients below float16's range, by layer."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

import scaler
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent
from loops import tasks
from loops.loop.loop import Loop
from loops.loop.visit import Visit
from loops.step import TrainStep

NAME = "underflow"
_EVERY = 10
_RATE = 0.05
_SCALES = {2.0**-10: "2^-10", 1.0: "1", 8.0: "8", 128.0: "128"}
"""The first scale stands for a loss that is a thousand times smaller."""
_EXPONENTS = range(-40, 1)
_KINDS = ("activation_gradients", "weight_gradients")


def run(seeds: int = 3, steps: int = 400) -> Effect:
    """Counts the gradients of a convolutional network by exponent while it trains in float32.

    Args:
        seeds: The number of networks.
        steps: The steps of each run.
    """
    found = [_count(seed, steps) for seed in range(seeds)]
    names = list(found[0])
    counts = {name: np.stack([each[name] for each in found]) for name in names}
    activations = [name for name in names if name.startswith(_KINDS[0])]
    kernels = [name for name in names if name.startswith(_KINDS[1])]
    together = {kind: _summed(counts, [name for name in names if name.startswith(kind)]) for kind in _KINDS}
    rows = [_row(_said(name), counts[name]) for name in [*activations, *kernels]]
    rows += [_row("**all activations**", together[_KINDS[0]]), _row("**all weights**", together[_KINDS[1]])]
    zeros, below = _zeros(together[_KINDS[0]]), _below(together[_KINDS[0]])
    band, of_weights = _band(together[_KINDS[0]]), _below(together[_KINDS[1]])
    behind_relu = _zeros(_summed(counts, [name for name in activations if "BatchNorm" in name]))
    lost = np.array([[_flushed(counts[name], scale) for name in activations] for scale in _SCALES])
    all_lost = np.array([_flushed(together[_KINDS[0]], scale) for scale in _SCALES]).mean(axis=1)
    smaller = [_flushed(together[kind], next(iter(_SCALES))) for kind in _KINDS]
    return Effect(
        **described(
            NAME,
            rate=_RATE,
            every=_EVERY,
            flushed=f"{100 * all_lost[1]:.2f} %",
            smaller_first=f"{100 * smaller[0].mean():.0f} %",
            smaller_second=f"{100 * smaller[1].mean():.1f} %",
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "zeros among gradients of activations",
                "67 % (SSD)",
                f"{percent(zeros)}; behind a ReLU {percent(behind_relu)}",
            ),
            (
                "gradients of weights below 2^-24",
                "about 5 % (speech)",
                f"{percent(of_weights, '.3f')}; at a loss 2^-10 times as large {percent(smaller[1])} are flushed",
            ),
        ),
        columns=(
            "gradient of",
            "true zeros",
            "below 2^-24",
            "in [2^-27, 2^-24)",
            *(f"flushed at scale {said}" for said in _SCALES.values()),
        ),
        rows=tuple(rows),
        claims=(
            Claim("most gradients behind a ReLU are zero, as 67 % of all are in SSD.", bool(behind_relu.mean() > 0.5)),
            Claim(
                "more gradients are zero in float32 than float16 makes zero.",
                bool((zeros > (1 - zeros) * _flushed(together[_KINDS[0]])).all()),
                published=False,
            ),
            Claim(
                "some percent of the gradients of weights lie below 2^-24, as in the speech network.",
                bool(of_weights.mean() > 0.005),
            ),
            Claim(
                "fewer gradients of weights than of activations lie below 2^-24.",
                bool((of_weights < below).all()),
                published=False,
            ),
            Claim(
                "some gradients of activations lie in [2^-27, 2^-24), the band that mattered in SSD.",
                bool((band > 0.001).all()),
            ),
            Claim(
                "a scale of 8, which was enough for SSD, keeps at least half of what float16 flushes.",
                bool(all_lost[2] <= 0.5 * all_lost[1]),
            ),
        ),
        panels=(
            Panel(
                "gradients of activations flushed",
                "",
                "share of non-zero gradients",
                tuple(
                    curve(f"scale {said}", range(len(activations)), np.where(lost[at] > 0, lost[at], np.nan))
                    for at, said in enumerate(_SCALES.values())
                ),
                log_y=10,
                ticks=tuple(_said(name).partition(" (")[0] for name in activations),
            ),
            Panel(
                "all gradients by exponent",
                "exponent",
                "share of non-zero gradients",
                tuple(
                    curve(said, _EXPONENTS, _by_exponent(together[kind], _EXPONENTS))
                    for said, kind in zip(("of activations", "of weights"), _KINDS, strict=True)
                ),
            ),
        ),
        measured={
            f"{what} {_said(name)}": function(counts[name]).tolist()
            for name in [*activations, *kernels]
            for what, function in (("true zeros", _zeros), ("below 2^-24", _below), ("flushed", _flushed))
        },
    )


def _count(seed: int, steps: int) -> dict[str, np.ndarray]:
    """Counts int64 [280] of each row, over the run."""
    keras.utils.set_random_seed(seed)
    task = tasks.load("digits")
    model = task.model("float32")
    watch = scaler.observe.watch(model, kinds=_KINDS, every=_EVERY)
    step = TrainStep(
        model,
        task.loss,
        keras.optimizers.SGD(_RATE),
        loss_scaler=scaler.LossScaler(scaler.NoScaling()),
        probes=watch,
    )
    total: list[np.ndarray] = []

    def add(visit: Visit) -> None:
        total.append(visit.vectors["counts"].sum(axis=0))

    Loop(step, task.dataset(task.batch_size, seed), steps_per_call=min(50, steps), actions=[add]).run(steps)
    kernels = [variable for variable in model.trainable_variables if len(variable.shape) > 1]
    wanted = _names(watch.names, model, kernels)
    summed = np.sum(total, axis=0)
    return {wanted[name]: summed[at] for at, name in enumerate(watch.names) if name in wanted}


def _names(rows: Sequence[str], model: keras.Model, kernels: Sequence) -> dict[str, str]:
    """The names of rows here, by Keras's names, whose numbers go on from model to model."""
    kinds: dict[str, int] = {}
    found = {}
    for layer in model.layers:
        kind = type(layer).__name__
        kinds[kind] = kinds.get(kind, 0) + 1
        said = f"{kind} {kinds[kind]}"
        if kind in ("Conv2D", "BatchNormalization", "ReLU", "Dense"):
            found[f"{_KINDS[0]}/{layer.name}"] = f"{_KINDS[0]}/{said}"
        found[f"{_KINDS[1]}/{layer.name}/kernel"] = f"{_KINDS[1]}/{said}"
    return {name: found[name] for name in rows if name in found}


def _said(name: str) -> str:
    kind, _, layer = name.partition("/")
    return layer.replace("BatchNormalization", "BatchNorm") + (" (kernel)" if kind == _KINDS[1] else "")


def _row(said: str, counts: np.ndarray) -> tuple[str, ...]:
    shares = [_zeros(counts), _below(counts), _band(counts), *(_flushed(counts, scale) for scale in _SCALES)]
    return (said, *(percent(share, ".2f") for share in shares))


def _summed(counts: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.sum([counts[name] for name in names], axis=0)


def _zeros(counts: np.ndarray) -> np.ndarray:
    return counts[:, scaler.observe.ZERO] / counts.sum(axis=1)


def _nonzero(counts: np.ndarray) -> np.ndarray:
    return np.maximum(counts.sum(axis=1) - counts[:, scaler.observe.ZERO], 1)


def _below(counts: np.ndarray) -> np.ndarray:
    return _between(counts, scaler.observe.LOWEST, -24)


def _band(counts: np.ndarray) -> np.ndarray:
    return _between(counts, -27, -24)


def _between(counts: np.ndarray, low: int, high: int) -> np.ndarray:
    first, last = scaler.observe.bin_of(low), scaler.observe.bin_of(high)
    return counts[:, first:last].sum(axis=1) / _nonzero(counts)


def _by_exponent(counts: np.ndarray, exponents: range) -> np.ndarray:
    """Shares [exponents, seeds]."""
    return np.array([counts[:, scaler.observe.bin_of(exponent)] / _nonzero(counts) for exponent in exponents])


def _flushed(counts: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """The share of non-zero values that float16 makes zero at a scale, [seeds]."""
    to = scaler.float_format("float16")
    lost = np.array([scaler.observe.cast(each, to, float(scale)).underflow.low for each in counts])
    return lost * counts.sum(axis=1) / _nonzero(counts)


EXPERIMENT = Experiment(NAME, "the share of gradients below float16, by layer", 400, run)
