"""How often dynamic scaling skips: once in growth_interval + 1 steps, where gradients do not move."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import course
from benchmarks.effects.effect import Claim, Effect, Experiment, Line, Panel, course_of, curve, described, percent

NAME = "skip-rate"
_INTERVALS = (3, 10, 30, 100)
_WALK = 0.5
_SYNTHETIC = 10
"""Steps of a synthetic trace for each live step: they are cheap without a network."""


def run(seeds: int = 3, steps: int = 2000) -> Effect:
    """Counts skips of `Dynamic` on a still and on a noisy trace, and live.

    Args:
        seeds: The number of traces and networks for each interval.
        steps: The steps of each live run; the traces are ten times as long.
    """
    still, noisy = (_on_trace(seeds, steps * _SYNTHETIC, noise) for noise in (0.0, _WALK))
    # The search from the initial scale up to the first overflow is not part of the steady state.
    strategies = [scaler.Dynamic(2.0**15, growth_interval=interval) for interval in _INTERVALS]
    seen = course.train(strategies, seeds=seeds, steps=steps)
    live = np.array([_after_first(seen.skipped[:, at]) for at in range(len(_INTERVALS))])
    expected = np.array([1 / (interval + 1) for interval in _INTERVALS])
    rows = [
        (f"{n}", f"{100 * e:.2f} %", percent(a, ".2f"), percent(b, ".2f"), percent(c, ".2f"))
        for n, e, a, b, c in zip(_INTERVALS, expected, still, noisy, live, strict=True)
    ]
    ratios = live.mean(axis=1) / expected
    return Effect(
        **described(NAME, walk=_WALK, low=ratios.min(), high=ratios.max()),
        seeds=seeds,
        steps=steps,
        beside=tuple(
            (f"skip rate at N = {n}", f"{e} (derived)", f"{live} live") for n, e, _, _, live in (rows[0], rows[-1])
        ),
        columns=("N", "derived", "constant", "noisy", "live"),
        rows=tuple(rows),
        claims=(
            Claim(
                "on a constant trace the rate is 1 / (N + 1), to within 2 % of itself.",
                _near(still, expected, 0.02),
                published=False,
            ),
            Claim(
                "live the rate is between half of 1 / (N + 1) and all of it.",
                bool(((ratios >= 0.5) & (ratios <= 1.02)).all()),
                published=False,
            ),
            Claim("the rate does not depend on noise.", bool(np.allclose(noisy, still, rtol=0.02)), published=False),
        ),
        panels=(
            Panel(
                "skipped steps",
                "growth interval N",
                "share of steps",
                (
                    Line("1 / (N + 1)", *(tuple(map(float, _INTERVALS)), *[tuple(expected.tolist())] * 3)),
                    curve("constant", _INTERVALS, still),
                    curve("noisy", _INTERVALS, noisy),
                    curve("live", _INTERVALS, live),
                ),
                log_x=10,
                log_y=10,
            ),
            Panel(
                "live, first seed",
                "step",
                "log2 of the loss scale",
                tuple(course_of(f"N = {n}", np.log2(seen.scale[:, at, :1])) for at, n in enumerate(_INTERVALS)),
            ),
        ),
        measured={
            f"{kind} {n}": values[at].tolist()
            for at, n in enumerate(_INTERVALS)
            for kind, values in (("constant", still), ("noisy", noisy), ("live", live))
        },
    )


def _on_trace(seeds: int, steps: int, noise: float) -> np.ndarray:
    """Skip rates [intervals, seeds] of strategies on a critical scale of 2^20.5, times a random factor at each step."""
    log_critical = 20.5 + noise * np.random.default_rng(0).normal(size=(steps, seeds)).astype(np.float32)
    critical = tf.constant(2.0**log_critical, tf.float32)
    strategies = [scaler.Dynamic(2.0**20, growth_interval=interval) for interval in _INTERVALS]

    @tf.function(autograph=True)
    def skips() -> tf.Tensor:
        states = [course.stacked(strategy.init(), seeds) for strategy in strategies]
        skipped = tf.TensorArray(tf.bool, steps)
        for step in tf.range(steps):
            finite = tf.stack([state.loss_scale <= critical[step] for state in states])
            skipped = skipped.write(step, tf.logical_not(finite))
            states = [
                strategy.update(state, scaler.Event(finite[at]))
                for at, (strategy, state) in enumerate(zip(strategies, states, strict=True))
            ]
        return skipped.stack()

    found = skips.get_concrete_function()().numpy()
    return np.array([_after_first(found[:, at]) for at in range(len(strategies))])


def _after_first(skipped: np.ndarray) -> np.ndarray:
    """The share of skips [seeds] in whole cycles, from one skip to the last; of all steps if there are under two."""
    rates = []
    for seed in skipped.T:
        at = np.flatnonzero(seed)
        rates.append((len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else len(at) / len(seed))
    return np.array(rates)


def _near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return bool((np.abs(found / expected[:, None] - 1) <= tolerance).all())


EXPERIMENT = Experiment(NAME, "the skip rate of dynamic scaling against 1 / (N + 1)", 2000, run)
