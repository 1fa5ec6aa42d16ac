"""16-bit weights with five ways of rounding: float32, masters, to nearest, at random, compensated."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, curve, curves
from benchmarks.effects.networks import Ends

_FORMATS = ("bfloat16", "float16")
_RATES = {"SGD": 0.02, "Adam": 5e-4}
_WAYS = ("masters", "nearest", "stochastic", "Kahan")
_EXACT = ("float32", "float32")
_SCALE = 2.0**10
_LATE, _LONGER = 64, 15
"""How many times smaller the rate of a late phase is, and how many times as many steps it takes."""
_PUBLISHED = 0.2
"""What is left of the accuracy of float32, relatively, with float16 weights and no masters."""
_BETA_2 = 0.99
"""Keras's 0.999 is 1 in bfloat16: then Adam's second moment never moves."""


def run(seeds: int, steps: int) -> Found:
    """Trains with SGD and Adam on weights of both 16-bit formats, updated in four ways, and in float32.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    pairs = list(itertools.product(_FORMATS, _WAYS))
    cases = [(name, *_EXACT) for name in _RATES] + [(name, *pair) for name in _RATES for pair in pairs]
    found = {case: _train(*case, seeds, steps, _RATES[case[0]]) for case in cases}
    slow = {
        case: _train("SGD", *case, seeds, _LONGER * steps, _RATES["SGD"] / _LATE)
        for case in (_EXACT, *(("float16", way) for way in _WAYS))
    }
    slow_exact, *slow_ways = (seen.accuracy for seen in slow.values())
    left = {way: accuracy / slow_exact for way, accuracy in zip(_WAYS, slow_ways, strict=True)}
    exact = {name: found[(name, *_EXACT)] for name in _RATES}
    lost = {case: exact[case[0]].accuracy.mean() - seen.accuracy.mean() for case, seen in found.items()}
    gap = max(abs(lost[name, "bfloat16", way]) for name in _RATES for way in ("stochastic", "Kahan"))
    gain = max(lost[name, "bfloat16", "nearest"] - lost[name, "bfloat16", "stochastic"] for name in _RATES)
    relative = max(lost[name, "float16", "nearest"] / exact[name].accuracy.mean() for name in _RATES)
    stayed = [[found[name, form, "nearest"].stayed for form in _FORMATS] for name in _RATES]
    return Found(
        words={
            "cost": 100 * gain,
            "mean_late_cost": 1 - left["nearest"].mean(),
            "late_cost": 1 - left["nearest"],
            "relative": relative,
            "gap": 100 * gap,
            "rounded": float(tf.cast(0.999, tf.bfloat16)),
            "ticks": [f"{'bf16' if format_ == 'bfloat16' else 'f16'} {way}" for format_, way in pairs],
        },
        rows=(
            (*case, seen.accuracy, seen.loss, "0 %" if case[1:] == _EXACT else seen.stayed)
            for case, seen in _with(found, slow, f"SGD, 1/{_LATE} of the rate").items()
        ),
        holds={
            "worse": [lost[name, "bfloat16", "nearest"] > 0 for name in _RATES],
            "careful": gap <= 0.01,
            "masters": [abs(points) <= 0.01 for case, points in lost.items() if case[2] == "masters"],
            "stay": [wide.min() > 0.5 and wide.min() > narrow.max() for wide, narrow in stayed],
            "most": relative > 0.5,
            "late": left["nearest"] < 0.5,
            "late-careful": [
                abs(slow["float16", way].accuracy.mean() - slow_exact.mean()) <= 0.01
                for way in _WAYS
                if way != "nearest"
            ],
        },
        lines=[
            curves(
                range(len(pairs)),
                {name: [found[(name, *pair)].loss / exact[name].loss for pair in pairs] for name in _RATES},
            ),
            curves(range(len(pairs)), {name: [found[(name, *pair)].stayed for pair in pairs] for name in _RATES}),
            (
                curve("SGD", range(len(_WAYS)), list(left.values())),
                curve("published", [_WAYS.index("nearest")], np.full([1, seeds], _PUBLISHED)),
            ),
        ],
        measured={
            # Both are said once where nothing is rounded.
            f"{kind} {' '.join(dict.fromkeys(case))}": getattr(seen, kind).tolist()
            for case, seen in _with(found, slow, "SGD late").items()
            for kind in Ends._fields
        },
    )


def _with(found: dict[tuple, Ends], slow: dict[tuple, Ends], name: str) -> dict[tuple, Ends]:
    """All runs, those at the small rate under this name."""
    return found | {(name, *case): seen for case, seen in slow.items()}


def _train(name: str, dtype: str, way: str, seeds: int, steps: int, rate: float) -> Ends:
    """Trains all seeds at once: their weights are the first axis of the same variables."""
    problem = networks.digits()
    variables = [tf.Variable(tf.cast(weight, dtype)) for weight in networks.start(seeds)]
    made = {
        "masters": scaler.MasterWeights,
        "stochastic": scaler.weights.StochasticRounding,
        "Kahan": scaler.weights.KahanWeights,
    }
    target = made[way](variables) if way in made else variables
    optimizer = keras.optimizers.SGD(rate) if name == "SGD" else keras.optimizers.Adam(rate, beta_2=_BETA_2)
    loss_scaler = scaler.LossScaler(scaler.Static(_SCALE) if dtype == "float16" else scaler.NoScaling())

    def rounding(values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(values, dtype), tf.float32)

    def take(step: tf.Tensor, state: tuple) -> tuple:
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
        return state, networks.share(stayed) / networks.share([grad != 0 for grad in seen.grads])

    stayed = networks.over_steps(steps, tuple, take)[1]
    return networks.ends_of(problem, [tf.cast(variable, tf.float32) for variable in variables], stayed)
