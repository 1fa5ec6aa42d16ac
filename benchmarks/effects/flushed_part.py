"""How much of what float16 flushes matters: training with the flushed part put back."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import course, networks
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent

NAME = "flushed-part"
_FACTORS = (-12, -14, -16, -18, -20, -22)
_MODES = ("float16", "put back", "flushed alone", "at random")
_SMALLEST = 2.0**-24
_ENOUGH = 0.01


def run(seeds: int = 3, steps: int = 400) -> Effect:
    """Trains with float16 gradients of ever smaller losses, in four ways that treat small values differently.

    Args:
        seeds: The number of networks for each way and size.
        steps: The steps of each run.
    """
    cases = list(itertools.product(_MODES, _FACTORS))
    seen = course.train(
        [scaler.NoScaling()] * len(cases),
        factors=[2.0**factor for _, factor in cases],
        seeds=seeds,
        steps=steps,
        rounding=_Rounding(np.repeat([_MODES.index(mode) for mode, _ in cases], seeds)),
        twin=True,
    )
    exact = course.train(
        [scaler.NoScaling()], seeds=seeds, steps=steps, forward_rounding=networks.half, rounding=networks.exact
    )
    shape = (len(_MODES), len(_FACTORS), seeds)
    accuracy, flushed = seen.accuracy.reshape(shape), seen.flushed.mean(axis=0).reshape(shape)
    loss = seen.test_loss.reshape(shape) / exact.test_loss[0]
    plain, back, alone, random = range(len(_MODES))
    least = exact.accuracy.mean() - _ENOUGH
    harmless = [at for at in range(len(_FACTORS)) if accuracy[plain, at].mean() >= least]
    survives = max((flushed[plain, at].mean() for at in harmless), default=0.0)
    return Effect(
        **described(
            NAME,
            accuracy=percent(exact.accuracy),
            loss=", ".join(f"{value:.2f}" for value in loss[plain].mean(axis=1)),
            survives=100 * survives,
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            ("gradients that may be flushed within a point of accuracy", "up to 85 %", f"up to {100 * survives:.0f} %"),
        ),
        columns=("loss times", "flushed in float16", *(f"accuracy, {mode}" for mode in _MODES)),
        rows=tuple(
            (f"2^{factor}", percent(flushed[plain, at]), *(percent(accuracy[mode, at]) for mode in range(len(_MODES))))
            for at, factor in enumerate(_FACTORS)
        ),
        claims=(
            Claim(
                "most non-zero gradients of activations can be flushed within a point of accuracy.",
                bool(survives > 0.5),
            ),
            Claim(
                "with the flushed part put back, no loss is too small: rounding the rest costs no point.",
                bool((accuracy[back].mean(axis=1) >= least).all()),
                published=False,
            ),
            Claim(
                "flushing alone does at least the harm of float16.",
                bool((accuracy[alone].mean(axis=1) <= accuracy[plain].mean(axis=1) + _ENOUGH).all()),
                published=False,
            ),
            Claim(
                "rounding the flushed part at random carries at least two octaves further within a point of float32 "
                f"(to {_edge(accuracy[random], least)}, float16 to {_edge(accuracy[plain], least)}).",
                len(harmless) < int((accuracy[random].mean(axis=1) >= least).sum()),
            ),
        ),
        panels=(
            Panel(
                "held-out accuracy",
                "log2 of the factor on the loss",
                "share",
                tuple(curve(mode, _FACTORS, accuracy[at]) for at, mode in enumerate(_MODES)),
                reference=(float(exact.accuracy.mean()), "float32 gradients"),
            ),
            Panel(
                "flushed in float16",
                "log2 of the factor on the loss",
                "share of non-zero gradients",
                (curve("of activations", _FACTORS, flushed[plain]),),
            ),
        ),
        measured={"accuracy float32": exact.accuracy[0].tolist()}
        | {
            f"{kind} {mode} 2^{factor}": values[i, j].tolist()
            for kind, values in (("accuracy", accuracy), ("loss ratio", loss), ("flushed", flushed))
            for i, mode in enumerate(_MODES)
            for j, factor in enumerate(_FACTORS)
        },
    )


def _edge(accuracy: np.ndarray, least: float) -> str:
    """The smallest factor on the loss whose accuracy is at least this, with all larger ones."""
    enough = accuracy.mean(axis=1) >= least
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


EXPERIMENT = Experiment(NAME, "how much of what float16 flushes matters: the flushed part put back", 400, run)
