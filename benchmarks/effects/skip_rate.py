"""How often dynamic scaling skips: once in growth_interval + 1 steps, where gradients do not move."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, Line, course_of, curves, flat

_INTERVALS = (3, 10, 30, 100)
_WALK = 0.5
_SYNTHETIC = 10
"""Steps of a synthetic trace for each live step: they are cheap without a network."""


def run(seeds: int, steps: int) -> Found:
    """Counts skips of `Dynamic` on a still and on a noisy trace, and live.

    Args:
        seeds: The number of traces and networks for each interval.
        steps: The steps of each live run; the traces are ten times as long.
    """
    still, noisy = (_on_trace(seeds, steps * _SYNTHETIC, noise) for noise in (0.0, _WALK))
    # The search from the initial scale up to the first overflow is not part of the steady state.
    strategies = [scaler.Dynamic(2.0**15, growth_interval=interval) for interval in _INTERVALS]
    seen = networks.train(strategies, seeds=seeds, steps=steps)
    live = np.array([_after_first(seen.skipped[:, at]) for at in range(len(_INTERVALS))])
    expected = np.array([1 / (interval + 1) for interval in _INTERVALS])
    ratios = live.mean(axis=1) / expected
    derived = tuple(expected.tolist())
    return Found(
        words={"low": ratios.min(), "high": ratios.max(), "expected": expected, "live": live},
        rows=zip(map(str, _INTERVALS), expected, still, noisy, live, strict=True),
        holds={
            "constant": np.abs(still / expected[:, None] - 1) <= 0.02,
            "live": (ratios >= 0.5) & (ratios <= 1.02),
            "noise": np.isclose(noisy, still, rtol=0.02),
        },
        lines=[
            (
                Line("1 / (N + 1)", tuple(map(float, _INTERVALS)), derived, derived, derived),
                *curves(_INTERVALS, {"constant": still, "noisy": noisy, "live": live}),
            ),
            [course_of(f"N = {n}", np.log2(seen.scale[:, at, :1])) for at, n in enumerate(_INTERVALS)],
        ],
        measured=flat({"constant": still, "noisy": noisy, "live": live}, _INTERVALS),
    )


def _on_trace(seeds: int, steps: int, noise: float) -> np.ndarray:
    """Skip rates [intervals, seeds] of strategies on a critical scale of 2^20.5, times a random factor at each step."""
    log_critical = 20.5 + noise * np.random.default_rng(0).normal(size=(steps, seeds)).astype(np.float32)
    critical = tf.constant(2.0**log_critical, tf.float32)
    strategies = [scaler.Dynamic(2.0**20, growth_interval=interval) for interval in _INTERVALS]

    def take(step: tf.Tensor, states: list) -> tuple:
        finite = tf.stack([state.loss_scale <= critical[step] for state in states])
        moved = [
            strategy.update(state, scaler.Event(finite[at]))
            for at, (strategy, state) in enumerate(zip(strategies, states, strict=True))
        ]
        return moved, 1.0 - tf.cast(finite, tf.float32)

    start = [networks.stacked(strategy.init(), seeds) for strategy in strategies]
    found = networks.over_steps(steps, lambda: start, take)[1] > 0
    return np.array([_after_first(found[:, at]) for at in range(len(strategies))])


def _after_first(skipped: np.ndarray) -> np.ndarray:
    """The share of skips [seeds] in whole cycles, from one skip to the last; of all steps if there are under two."""
    rates = []
    for seed in skipped.T:
        at = np.flatnonzero(seed)
        rates.append((len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else len(at) / len(seed))
    return np.array(rates)
