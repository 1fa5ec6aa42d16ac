"""How far gradients of activations are from a log-normal law, and what it says of the share that a format flushes."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import keras
import numpy as np

import scaler
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent, spread
from benchmarks.effects.laws import EDGES, LAWS, NORMAL_SPREAD, Fit, fits_of, shares_below
from loops import tasks
from loops.loop.loop import Loop
from loops.loop.visit import Visit
from loops.step.train_step import TrainStep
from loops.tasks import TextTask

NAME = "log-normal"
_TASKS = {"digits": "CNN", "text": "transformer"}
_RATE = 1e-3
_EVERY = 20
_KIND = "activation_gradients"
_FORMAT = "float8_e4m3fn"
_FREE = (0, 4, 8)
"""Octaves that stay free above the largest gradient."""
_NEAR = 0.05
_DEVIATIONS = np.arange(-40, 26) / 10


class _Seen(NamedTuple):
    """Means over the tensors and the measured steps of a run.

    Attributes:
        distance: [laws], the statistic of Kolmogorov and Smirnov.
        nearest: [laws], the share of tensors to which the law is nearest.
        octaves: The deviation of log2 |gradient|.
        counted: [casts], the share of the non-zero gradients that the cast makes zero.
        fitted: [casts, laws], the same by each law.
        below: [deviations], the share that lies below so many deviations from the mean, on a log scale.
    """

    distance: np.ndarray
    nearest: np.ndarray
    octaves: float
    counted: np.ndarray
    fitted: np.ndarray
    below: np.ndarray


def run(seeds: int = 5, steps: int = 200) -> Effect:
    """Trains the digits' CNN and the small transformer, and fits three laws to each tensor's gradients.

    Args:
        seeds: The number of networks of each kind.
        steps: The steps of each run.
    """
    seen = {said: [_measure(task, seed, steps) for seed in range(seeds)] for task, said in _TASKS.items()}
    distance, nearest, octaves, counted, fitted, below = (
        {said: np.array([getattr(one, field) for one in runs]) for said, runs in seen.items()}
        for field in _Seen._fields
    )
    first = {said: values[:, 0] for said, values in nearest.items()}
    error = {
        said: np.abs(np.log2(np.maximum(fitted[said], 1e-9) / counted[said][:, :, None])).mean(axis=0) for said in seen
    }
    names = [f"{free} free" for free in _FREE]
    distances = ", ".join(f"{said} {spread(values[:, 0], '.3f')}" for said, values in distance.items())
    return Effect(
        **described(
            NAME,
            rate=_RATE,
            every=_EVERY,
            normal_spread=NORMAL_SPREAD,
            laplace_spread=_LAPLACE_SPREAD,
            **{name: 2.0 ** error[name][:, 0].max() for name in seen},
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            ("distance from a log-normal law", "approximately log-normal", distances),
            (
                "tensors to which the log-normal law is nearest of the three",
                "normal and Laplace fail",
                ", ".join(f"{said} {percent(values, '.0f')}" for said, values in first.items()),
            ),
        ),
        columns=("network", "", "counted", *LAWS),
        rows=tuple(
            row
            for said in seen
            for row in (
                (said, "distance", "", *(spread(distance[said][:, law], ".3f") for law in range(len(LAWS)))),
                (
                    said,
                    "deviation of log2, octaves",
                    spread(octaves[said], ".1f"),
                    "free",
                    f"{NORMAL_SPREAD:.1f}",
                    f"{_LAPLACE_SPREAD:.1f}",
                ),
                *(
                    (
                        said,
                        f"flushed in E4M3, {name}",
                        percent(counted[said][:, at], ".2f"),
                        *(percent(fitted[said][:, at, law], ".2f") for law in range(len(LAWS))),
                    )
                    for at, name in enumerate(names)
                ),
            )
        ),
        claims=(*(claim for said in seen for claim in _claims(said, distance[said], first[said], error[said])),),
        panels=(
            Panel(
                "distance from the law",
                "",
                "Kolmogorov-Smirnov distance",
                tuple(curve(said, range(len(LAWS)), values.T) for said, values in distance.items()),
                ticks=LAWS,
            ),
            Panel(
                "lower tail of the gradients",
                "deviations from the mean of log2 |gradient|",
                "share below",
                (
                    *(curve(said, _DEVIATIONS, np.where(below[said] > 0, below[said], np.nan).T) for said in seen),
                    curve("log-normal (published)", _DEVIATIONS, _normal_law()),
                ),
                log_y=10,
            ),
            Panel(
                "flushed in E4M3, transformer",
                "",
                "share of non-zero gradients",
                (
                    curve("counted", range(len(_FREE)), counted["transformer"].T),
                    *(curve(law, range(len(_FREE)), fitted["transformer"][:, :, at].T) for at, law in enumerate(LAWS)),
                ),
                log_y=10,
                ticks=tuple(names),
            ),
        ),
        measured={
            f"{what} {said} {law}": values[said][:, at].tolist()
            for said in seen
            for what, values in (("distance", distance), ("nearest", nearest))
            for at, law in enumerate(LAWS)
        }
        | {
            f"flushed {said} {name} {law}": values[:, at].tolist()
            for said in seen
            for at, name in enumerate(names)
            for law, values in (
                ("counted", counted[said]),
                *((law, fitted[said][:, :, number]) for number, law in enumerate(LAWS)),
            )
        }
        | {f"octaves {said}": octaves[said].tolist() for said in seen},
    )


def _claims(said: str, distance: np.ndarray, nearest: np.ndarray, error: np.ndarray) -> tuple[Claim, ...]:
    """What is claimed of one network.

    Args:
        said: Its name.
        distance: [seeds, laws].
        nearest: [seeds], the share of tensors to which the log-normal law is nearest.
        error: [casts, laws], the mean error of the flushed share in octaves.
    """
    return (
        Claim(
            f"{said}: gradients are within a distance of {_NEAR} of a log-normal law, on average.",
            bool(distance[:, 0].mean() <= _NEAR),
        ),
        Claim(
            f"{said}: the log-normal law is the nearest, on average and for most tensors.",
            bool((distance[:, 0] < distance[:, 1:].min(axis=1)).all() and (nearest > 0.5).all()),
        ),
        Claim(
            f"{said}: it gives each flushed share within a factor of 2, and better than the others.",
            bool((error[:, 0] <= 1).all() and (error[:, 0] < error[:, 1:].min(axis=1)).all()),
        ),
    )


_LAPLACE_SPREAD = math.pi / (math.sqrt(6) * math.log(2))
"""The deviation of log2 |x| of a Laplace x, in octaves."""


def _measure(name: str, seed: int, steps: int) -> _Seen:
    keras.utils.set_random_seed(seed)
    task = tasks.load(name)
    if isinstance(task, TextTask):
        task = dataclasses.replace(task, context=32, width=32)
    model = task.model("float32")
    step = TrainStep(
        model,
        task.loss,
        keras.optimizers.Adam(_RATE),
        loss_scaler=scaler.LossScaler(scaler.NoScaling()),
        probes=scaler.observe.watch(model, kinds=[_KIND], every=_EVERY),
    )
    counts: list[np.ndarray] = []

    def add(visit: Visit) -> None:
        # Steps that are not measured have counts of 0, and so have gradients that nothing reads.
        if 2 * visit.counters.attempted > steps:
            counts.extend(
                row for rows in visit.vectors["counts"] for row in rows if row[scaler.observe.ZERO + 1 :].any()
            )

    Loop(step, task.dataset(task.batch_size, seed), steps_per_call=min(_EVERY, steps), actions=[add]).run(steps)
    fits = [fits_of(each) for each in counts]
    distance = np.array([[fit.distance for fit in each] for each in fits])
    lost = [[_lost(each, laws, free) for free in _FREE] for each, laws in zip(counts, fits, strict=True)]
    return _Seen(
        distance=distance.mean(axis=0),
        nearest=np.bincount(distance.argmin(axis=1), minlength=len(LAWS)) / len(distance),
        octaves=float(np.mean([laws[0].spread for laws in fits])),
        counted=np.mean([[one[0] for one in row] for row in lost], axis=0),
        fitted=np.mean([[one[1:] for one in row] for row in lost], axis=0),
        below=np.mean([_by_deviation(each, laws[0]) for each, laws in zip(counts, fits, strict=True)], axis=0),
    )


def _lost(counts: np.ndarray, laws: tuple[Fit, ...], free: int) -> list[float]:
    """The flushed share of the non-zero values: counted, then by each law."""
    to = scaler.float_format(_FORMAT)
    top = EDGES[int(np.argmax(shares_below(counts) >= 1))]
    scale = math.floor(math.log2(to.max)) - int(top) - free
    # The largest scale has to be one that float32 can hold.
    scale = min(scale, 126)
    cast = scaler.observe.cast(counts, to, 2.0**scale)
    counted = cast.underflow.low * cast.values / (cast.values - int(counts[scaler.observe.ZERO]))
    return [counted, *(law.below(math.log2(to.zero_threshold) - scale) for law in laws)]


def _by_deviation(counts: np.ndarray, law: Fit) -> np.ndarray:
    return np.interp(_DEVIATIONS, (EDGES - law.centre) / law.spread, shares_below(counts))


def _normal_law() -> np.ndarray:
    law = Fit("log-normal", 0.0, 0.0, 1.0)
    return np.array([[law.below(at)] for at in _DEVIATIONS])


EXPERIMENT = Experiment(NAME, "how near gradients are to a log-normal law", 200, run, seeds=5)
