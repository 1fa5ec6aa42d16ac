"""16-bit weights with five ways of rounding: float32, masters, to nearest, at random, compensated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent, spread

NAME = "sixteen-bit-weights"
_FORMATS = ("bfloat16", "float16")
_RATES = {"SGD": 0.02, "Adam": 5e-4}
_WAYS = ("masters", "nearest", "stochastic", "Kahan")
_SCALE = 2.0**10
_LATE, _LONGER = 64, 15
"""How many times smaller the rate of a late phase is, and how many times as many steps it takes."""
_PUBLISHED = 0.2
"""What is left of the accuracy of float32, relatively, with float16 weights and no masters."""
_BETA_2 = 0.99
"""Keras's 0.999 is 1 in bfloat16: then Adam's second moment never moves."""


class _Result(NamedTuple):
    """For each seed: held-out accuracy and loss, and the share of updates that did not change their 16-bit weight."""

    accuracy: np.ndarray
    loss: np.ndarray
    stayed: np.ndarray


def run(seeds: int = 3, steps: int = 600) -> Effect:
    """Trains with SGD and Adam on weights of both 16-bit formats, updated in four ways, and in float32.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    exact = {name: _train(name, "float32", "float32", seeds, steps) for name in _RATES}
    cases = list(itertools.product(_RATES, _FORMATS, _WAYS))
    found = {case: _train(*case, seeds, steps) for case in cases}
    slow = {way: _train("SGD", "float16", way, seeds, _LONGER * steps, _RATES["SGD"] / _LATE) for way in _WAYS}
    slow_exact = _train("SGD", "float32", "float32", seeds, _LONGER * steps, _RATES["SGD"] / _LATE)
    left = {way: seen.accuracy / slow_exact.accuracy for way, seen in slow.items()}
    lost = {case: exact[case[0]].accuracy.mean() - seen.accuracy.mean() for case, seen in found.items()}
    rows = [
        (name, "float32", "float32", percent(seen.accuracy), spread(seen.loss, ".3f"), "0 %")
        for name, seen in exact.items()
    ]
    rows += [
        (*case, percent(seen.accuracy), spread(seen.loss, ".3f"), percent(seen.stayed)) for case, seen in found.items()
    ]
    late = f"SGD, 1/{_LATE} of the rate"
    rows += [
        (late, format_, way, percent(seen.accuracy), spread(seen.loss, ".3f"), stayed)
        for format_, way, seen, stayed in (
            ("float32", "float32", slow_exact, "0 %"),
            *(("float16", way, seen, percent(seen.stayed)) for way, seen in slow.items()),
        )
    ]
    careful = [case for case in cases if case[1] == "bfloat16" and case[2] in ("stochastic", "Kahan")]
    gap = max(abs(lost[case]) for case in careful)
    gain = max(lost[name, "bfloat16", "nearest"] - lost[name, "bfloat16", "stochastic"] for name in _RATES)
    relative = max(lost[name, "float16", "nearest"] / exact[name].accuracy.mean() for name in _RATES)
    ticks = tuple(f"{'bf16' if format_ == 'bfloat16' else 'f16'} {way}" for format_ in _FORMATS for way in _WAYS)
    return Effect(
        **described(
            NAME,
            scale=_SCALE,
            rate_sgd=_RATES["SGD"],
            rate_adam=_RATES["Adam"],
            beta_2=_BETA_2,
            late=_LATE,
            longer=_LONGER,
            cost=100 * gain,
            late_cost=100 * (1 - left["nearest"].mean()),
            rounded=float(tf.cast(0.999, tf.bfloat16)),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "float16 without masters: relative loss of accuracy",
                f"{100 * (1 - _PUBLISHED):.0f} %",
                f"{100 * relative:.0f} %; at 1/{_LATE} of the rate {percent(1 - left['nearest'], '.0f')}",
            ),
            ("bfloat16, stochastic or Kahan: distance to float32", "0.1 to 0.2 %", f"at most {100 * gap:.1f} points"),
            ("their gain over rounding to nearest in bfloat16", "up to 7 points", f"up to {100 * gain:.1f} points"),
        ),
        columns=("optimizer", "weights", "rounding", "accuracy", "held-out loss", "stayed"),
        rows=tuple(rows),
        claims=(
            Claim(
                "rounding to nearest in bfloat16 is worse than float32.",
                all(lost[name, "bfloat16", "nearest"] > 0 for name in _RATES),
            ),
            Claim(
                "stochastic rounding and Kahan summation in bfloat16 come within one point of float32.",
                bool(gap <= 0.01),
            ),
            Claim("masters come within one point of float32 in both formats.", _within(lost, "masters")),
            Claim(
                "to nearest most bfloat16 weights stay in a step, and fewer of float16.",
                all(
                    bool(
                        found[name, "bfloat16", "nearest"].stayed.min() > 0.5
                        and found[name, "bfloat16", "nearest"].stayed.min()
                        > found[name, "float16", "nearest"].stayed.max()
                    )
                    for name in _RATES
                ),
                published=False,
            ),
            Claim(
                "float16 without masters loses most of its accuracy, with the worse optimizer.", bool(relative > 0.5)
            ),
            Claim(f"at 1/{_LATE} of the rate it does.", bool((left["nearest"] < 0.5).all())),
            Claim(
                "at that rate masters, stochastic rounding and Kahan summation stay within a point of float32.",
                all(
                    abs(slow[way].accuracy.mean() - slow_exact.accuracy.mean()) <= 0.01
                    for way in _WAYS
                    if way != "nearest"
                ),
            ),
        ),
        panels=(
            Panel(
                "held-out loss",
                "",
                "times that of float32",
                tuple(
                    curve(
                        name,
                        range(len(ticks)),
                        np.array(
                            [found[name, format_, way].loss / exact[name].loss for format_ in _FORMATS for way in _WAYS]
                        ),
                    )
                    for name in _RATES
                ),
                reference=(1.0, "float32"),
                ticks=ticks,
            ),
            Panel(
                "weights that stay as they are in a step",
                "",
                "share",
                tuple(
                    curve(
                        name,
                        range(len(ticks)),
                        np.array([found[name, format_, way].stayed for format_ in _FORMATS for way in _WAYS]),
                    )
                    for name in _RATES
                ),
                ticks=ticks,
            ),
            Panel(
                f"float16 at 1/{_LATE} of the rate",
                "",
                "accuracy, times that of float32",
                (
                    curve("SGD", range(len(_WAYS)), np.array([left[way] for way in _WAYS])),
                    curve("published", [_WAYS.index("nearest")], np.full([1, seeds], _PUBLISHED)),
                ),
                reference=(1.0, "float32"),
                ticks=_WAYS,
            ),
        ),
        measured={
            f"{kind} {name}": getattr(seen, kind).tolist()
            for name, seen in [(f"{name} float32", seen) for name, seen in exact.items()]
            + [(" ".join(case), seen) for case, seen in found.items()]
            + [("SGD late float32", slow_exact)]
            + [(f"SGD late float16 {way}", seen) for way, seen in slow.items()]
            for kind in _Result._fields
        },
    )


def _train(name: str, dtype: str, way: str, seeds: int, steps: int, rate: float | None = None) -> _Result:
    """Trains all seeds at once: their weights are the first axis of the same variables."""
    rate = rate or _RATES[name]
    problem = networks.digits()
    variables = [tf.Variable(tf.cast(weight, dtype)) for weight in networks.start(seeds)]
    target = _target(way, variables)
    optimizer = keras.optimizers.SGD(rate) if name == "SGD" else keras.optimizers.Adam(rate, beta_2=_BETA_2)
    loss_scaler = scaler.LossScaler(scaler.Static(_SCALE) if dtype == "float16" else scaler.NoScaling())

    def rounding(values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(values, dtype), tf.float32)

    def attempt(step: tf.Tensor) -> tf.Tensor:
        images, labels = networks.batch(problem, step, seeds)
        before = [tf.cast(variable, tf.float32) for variable in variables]
        scale = tf.fill([seeds], loss_scaler.loss_scale)
        seen = networks.backward(before, images, labels, scale, networks.exact, rounding)
        grads = [tf.cast(grad, dtype) for grad in seen.grads]
        loss_scaler.apply(optimizer, grads, target, allow_16bit_updates=way == "nearest")
        stayed = [
            tf.logical_and(tf.cast(variable, tf.float32) == old, grad != 0)
            for variable, old, grad in zip(variables, before, seen.grads, strict=True)
        ]
        return networks.share(stayed) / networks.share([grad != 0 for grad in seen.grads])

    @tf.function(autograph=True)
    def run() -> tf.Tensor:
        stayed = tf.zeros([seeds])
        for step in tf.range(steps):
            share = attempt(step)
            if step >= steps // 2:
                stayed += share
        return stayed / tf.cast(steps - steps // 2, tf.float32)

    share = run.get_concrete_function()()
    weights = [tf.cast(variable, tf.float32) for variable in variables]
    loss, accuracy = networks.evaluate(weights, problem.test_images, problem.test_labels)
    return _Result(accuracy.numpy(), loss.numpy(), share.numpy())


def _target(way: str, variables: Sequence[tf.Variable]) -> Any:
    """The variables that `LossScaler.apply` updates."""
    if way == "stochastic":
        return scaler.weights.StochasticRounding(variables)
    if way == "Kahan":
        return scaler.weights.KahanWeights(variables)
    return scaler.MasterWeights(variables) if way == "masters" else variables


def _within(lost: dict[tuple[str, str, str], Any], way: str) -> bool:
    return all(abs(points) <= 0.01 for case, points in lost.items() if case[2] == way)


EXPERIMENT = Experiment(NAME, "16-bit weights with five ways of rounding", 600, run)
