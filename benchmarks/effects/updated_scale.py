"""A bug that many scalers had: gradients unscaled by the scale that the step has just moved to."""

from __future__ import annotations

import numpy as np

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, Line, curves, flat

_INTERVALS = (1, 2, 5, 10, 30, 100)


def run(seeds: int, steps: int) -> Found:
    """Trains with the right and with the updated scale, and compares the size of the steps.

    Args:
        seeds: The number of networks for each interval.
        steps: The steps of each run.
    """
    strategies = [scaler.Dynamic(growth_interval=interval) for interval in _INTERVALS]
    wrongly = [updated for updated in (False, True) for _ in strategies]
    seen = networks.train([*strategies, *strategies], seeds=seeds, steps=steps, updated=wrongly)
    right, wrong = np.split(np.nanmean(np.where(seen.skipped, np.nan, 1 / seen.divisor), axis=0), 2)
    losses, wrong_losses = np.split(seen.loss.mean(axis=0), 2)
    expected = np.array([1 - 1 / (2 * interval) for interval in _INTERVALS])
    away = np.abs(wrong / expected[:, None] - 1).max()
    slower = wrong_losses / losses
    derived = tuple(expected.tolist())
    return Found(
        words={"expected": expected, "wrong": wrong, "away": away},
        rows=zip(map(str, _INTERVALS), expected, wrong, right, slower, strict=True),
        holds={
            "size": away <= 0.05,
            "exact": (wrong[0] == 0.5).all() and (expected - 1e-6 <= wrong.T).all(),
            "right": right == 1,
            "slower": slower[0] > 1,
            "same": np.abs(slower[-1] - 1).max() < 0.02,
        },
        lines=[
            (
                Line("1 - 1 / (2N)", tuple(map(float, _INTERVALS)), derived, derived, derived),
                *curves(_INTERVALS, {"updated scale": wrong, "own scale": right}),
            ),
            curves(_INTERVALS, {"updated scale": slower}),
        ],
        measured=flat({"step": wrong, "loss": slower}, _INTERVALS),
    )
