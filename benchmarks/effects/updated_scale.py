"""A bug that many scalers had: gradients unscaled by the scale that the step has just moved to."""

from __future__ import annotations

import numpy as np

import scaler
from benchmarks.effects import course
from benchmarks.effects.effect import Claim, Effect, Experiment, Line, Panel, curve, described, spread

NAME = "updated-scale"
_INTERVALS = (1, 2, 5, 10, 30, 100)


def run(seeds: int = 3, steps: int = 1500) -> Effect:
    """Trains with the right and with the updated scale, and compares the size of the steps.

    Args:
        seeds: The number of networks for each interval.
        steps: The steps of each run.
    """
    strategies = [scaler.Dynamic(growth_interval=interval) for interval in _INTERVALS]
    seen = course.train(
        [*strategies, *strategies],
        seeds=seeds,
        steps=steps,
        updated=[False] * len(strategies) + [True] * len(strategies),
    )
    size = np.nanmean(np.where(seen.skipped, np.nan, 1 / seen.divisor), axis=0)
    right, wrong = np.split(size, 2)
    losses, wrong_losses = np.split(seen.loss.mean(axis=0), 2)
    expected = np.array([1 - 1 / (2 * interval) for interval in _INTERVALS])
    away = np.abs(wrong / expected[:, None] - 1).max()
    slower = wrong_losses / losses
    return Effect(
        **described(NAME),
        seeds=seeds,
        steps=steps,
        beside=tuple(
            (f"mean step at N = {n}", f"{e:.4f} (derived)", spread(w, ".4f"))
            for n, e, w in list(zip(_INTERVALS, expected, wrong, strict=True))[:: len(_INTERVALS) - 1]
        ),
        columns=(
            "N",
            "derived step",
            "measured step",
            "with the right scale",
            "mean loss, to that with the right scale",
        ),
        rows=tuple(
            (f"{n}", f"{e:.4f}", spread(w, ".4f"), spread(r, ".4f"), spread(s, ".3f"))
            for n, e, w, r, s in zip(_INTERVALS, expected, wrong, right, slower, strict=True)
        ),
        claims=(
            Claim(f"the mean step is 1 - 1 / (2N) to within {100 * away:.1f} %.", bool(away <= 0.05), published=False),
            Claim(
                "at N = 1 it is exactly that, and it is never less.",
                bool((wrong[0] == 0.5).all() and (expected - 1e-6 <= wrong.T).all()),
                published=False,
            ),
            Claim("with the step's own scale the step is exactly 1.", bool((right == 1).all()), published=False),
            Claim(
                "at N = 1 the loss falls more slowly.",
                bool((slower[0] > 1).all()),
                published=False,
            ),
            Claim(
                "at N = 100 nothing of it shows in the loss.",
                bool(np.abs(slower[-1] - 1).max() < 0.02),
                published=False,
            ),
        ),
        panels=(
            Panel(
                "mean step",
                "growth interval N",
                "share of the right step",
                (
                    Line("1 - 1 / (2N)", *(tuple(map(float, _INTERVALS)), *[tuple(expected.tolist())] * 3)),
                    curve("updated scale", _INTERVALS, wrong),
                    curve("own scale", _INTERVALS, right),
                ),
                log_x=10,
            ),
            Panel(
                "mean loss of the run",
                "growth interval N",
                "times that with the right scale",
                (curve("updated scale", _INTERVALS, slower),),
                log_x=10,
                reference=(1.0, "the right scale"),
            ),
        ),
        measured={f"step {n}": wrong[at].tolist() for at, n in enumerate(_INTERVALS)}
        | {f"loss {n}": slower[at].tolist() for at, n in enumerate(_INTERVALS)},
    )


EXPERIMENT = Experiment(NAME, "what unscaling by the updated scale does to a step", 1500, run)
