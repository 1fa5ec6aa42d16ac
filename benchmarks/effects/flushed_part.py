"""How much of what float16 flushes matters: training with the flushed part put back."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, curves, flat

_FACTORS = (-12, -14, -16, -18, -20, -22)
_MODES = ("float16", "put back", "flushed alone", "at random")
_SMALLEST = 2.0**-24
_ENOUGH = 0.01


def run(seeds: int, steps: int) -> Found:
    """Trains with float16 gradients of ever smaller losses, in four ways that treat small values differently.

    Args:
        seeds: The number of networks for each way and size.
        steps: The steps of each run.
    """
    cases = list(itertools.product(_MODES, _FACTORS))
    seen = networks.train(
        [scaler.NoScaling()] * len(cases),
        factors=[2.0**factor for _, factor in cases],
        seeds=seeds,
        steps=steps,
        rounding=_Rounding(np.repeat([_MODES.index(mode) for mode, _ in cases], seeds)),
        twin=True,
    )
    exact = networks.train([scaler.NoScaling()], seeds=seeds, steps=steps, rounding=networks.exact)
    shape = (len(_MODES), len(_FACTORS), seeds)
    accuracy, flushed = seen.accuracy.reshape(shape), seen.flushed.mean(axis=0).reshape(shape)
    loss = seen.test_loss.reshape(shape) / exact.test_loss[0]
    means, least = accuracy.mean(axis=2), exact.accuracy.mean() - _ENOUGH
    plain, back, alone, random = means
    survives = max(flushed[0, plain >= least].mean(axis=1), default=0.0)
    return Found(
        words={
            "accuracy": exact.accuracy[0],
            "loss": ", ".join(f"{value:.2f}" for value in loss[0].mean(axis=1)),
            "survives": survives,
            "to_at_random": _edge(random, least),
            "to": _edge(plain, least),
        },
        rows=((f"2^{factor}", flushed[0, at], *accuracy[:, at]) for at, factor in enumerate(_FACTORS)),
        holds={
            "most": survives > 0.5,
            "back": back >= least,
            "alone": alone <= plain + _ENOUGH,
            "random": (plain >= least).sum() < (random >= least).sum(),
        },
        lines=[
            curves(_FACTORS, dict(zip(_MODES, accuracy, strict=True))),
            curves(_FACTORS, {"of activations": flushed[0]}),
        ],
        measured=flat({"accuracy float32": exact.accuracy[0]})
        | flat(
            {"accuracy": accuracy, "loss ratio": loss, "flushed": flushed},
            _MODES,
            [f"2^{factor}" for factor in _FACTORS],
        ),
    )


def _edge(accuracy: np.ndarray, least: float) -> str:
    """The smallest factor on the loss whose mean accuracy is at least this, with all larger ones."""
    enough = accuracy >= least
    count = len(enough) if enough.all() else int(np.argmin(enough))
    return f"2^{_FACTORS[count - 1]}" if count else "none"


class _Rounding:
    """The rounding of gradients: one of `_MODES` for each copy, by index."""

    def __init__(self, modes: np.ndarray):
        self._modes = modes
        self._calls = itertools.count()

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        rounded = networks.half(values)
        lost = tf.logical_and(rounded == 0, values != 0)
        # A call does not know the step, so the values seed the random numbers, which then differ between steps.
        noise = tf.bitcast(tf.reduce_sum(tf.abs(values)), tf.int32)
        drawn = tf.random.stateless_uniform(tf.shape(values), tf.stack([next(self._calls), noise]))
        chosen = tf.sign(values) * tf.where(drawn < tf.abs(values) / _SMALLEST, _SMALLEST, 0.0)
        zero = tf.zeros_like(values)
        made = (rounded, tf.where(lost, values, rounded), tf.where(lost, zero, values), tf.where(lost, chosen, rounded))
        modes = tf.constant(self._modes)[:, None, None]
        result = made[0]
        for number in range(1, len(_MODES)):
            result = tf.where(modes == number, made[number], result)
        return result
