"""Strategies that look ahead of an overflow: how often they skip, on one trace and live."""

from __future__ import annotations

import math

import numpy as np

import scaler
from benchmarks.effects import course
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, course_of, curve, described, percent, spread

NAME = "look-ahead"
_TOP = 2.0**40
_LARGEST = 65504.0
_SKIPPED_AT_MOST = 0.001


def _strategies() -> dict[str, scaler.Strategy]:
    return {
        "Dynamic, N = 200": scaler.Dynamic(growth_interval=200),
        "LogNormal": scaler.LogNormal(max_scale=_TOP),
        "LogNormal, as published": scaler.LogNormal(max_scale=_TOP, repaired=False),
        "Histogram, edge 1/16": scaler.Histogram(edge=_LARGEST / 16),
        "Histogram, edge 1/8": scaler.Histogram(edge=_LARGEST / 8),
        "Headroom": scaler.Headroom(),
        "DelayedAmax, margin 3": scaler.DelayedAmax(2.0**10, margin=3, history_length=16),
    }


def run(seeds: int = 3, steps: int = 2000) -> Effect:
    """Counts the skips of each strategy while all see the same weights, and while each trains its own.

    Args:
        seeds: The number of networks for each strategy.
        steps: The steps of each run.
    """
    strategies = _strategies()
    names, given = list(strategies), list(strategies.values())
    trace = course.train(given, seeds=seeds, steps=steps, shared=True)
    live = course.train(given, seeds=seeds, steps=steps, twin=True)
    rates = {"trace": trace.skipped.mean(axis=0), "live": live.skipped.mean(axis=0)}
    bounds = {kind: [interval(seen.skipped[:, at]) for at in range(len(names))] for kind, seen in _both(trace, live)}
    mean_log = np.log2(live.scale).mean(axis=0)
    flushed = np.nanmean(live.flushed, axis=0)
    model, published, sixteenth, eighth = (names.index(name) for name in names[1:5])
    finite = ~trace.skipped
    weights = float((trace.largest <= trace.amax)[finite].mean())
    rows = tuple(
        (
            name,
            *(f"{percent(rates[kind][at], '.2f')}, {_interval(bounds[kind][at])}" for kind in ("trace", "live")),
            spread(mean_log[at], ".1f"),
            percent(flushed[at], ".2f"),
            percent(live.accuracy[at]),
        )
        for at, name in enumerate(names)
    )
    return Effect(
        **described(NAME, eighth=100 * rates["live"][eighth].mean()),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "probability of an overflow with LogNormal",
                "below 0.001",
                f"{spread(rates['live'][published], '.5f')} as published, {spread(rates['live'][model], '.5f')} as "
                f"repaired",
            ),
        ),
        columns=(
            "strategy",
            "skipped on the trace",
            "skipped live",
            "mean log2 scale live",
            "flushed live",
            "accuracy",
        ),
        rows=rows,
        claims=(
            Claim(
                f"LogNormal as published skips less than {_SKIPPED_AT_MOST} of the steps on the trace.",
                bool(rates["trace"][published].mean() < _SKIPPED_AT_MOST),
            ),
            Claim(
                f"LogNormal as repaired skips less than {_SKIPPED_AT_MOST} of the steps live.",
                bool(rates["live"][model].mean() < _SKIPPED_AT_MOST),
                published=False,
            ),
            Claim(
                "an edge at 1/16 skips no more than one at 1/8, on the trace and live.",
                all(bool(rate[sixteenth].mean() <= rate[eighth].mean()) for rate in rates.values()),
                published=False,
            ),
            Claim(
                "the largest value is a gradient of weights, which strategies see, in nine of ten steps of the trace "
                f"(in {100 * weights:.1f} %).",
                bool(weights > 0.9),
                published=False,
            ),
            Claim(
                "each strategy skips as often live as on the trace, to within the intervals.",
                all(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(bounds["trace"], bounds["live"], strict=True)),
                published=False,
            ),
            Claim(
                "after an overflow LogNormal as published has a useful scale: a mean log2 at most four octaves below "
                "the repaired rule's, in each seed.",
                bool((mean_log[published] > mean_log[model] - 4).all()),
                published=False,
            ),
            Claim(
                "the strategy that skips least has a lower mean scale than Dynamic.",
                bool(mean_log[int(np.argmin(rates["live"].mean(axis=1)))].mean() < mean_log[0].mean()),
                published=False,
            ),
        ),
        panels=(
            Panel(
                "skipped steps",
                "",
                "share of steps",
                tuple(curve(kind, range(len(names)), rates[kind]) for kind in ("trace", "live")),
                reference=(_SKIPPED_AT_MOST, "0.001, LogNormal's promise"),
                ticks=tuple(name.replace(", as published", " 2018") for name in names),
            ),
            Panel(
                "live, first seed",
                "step",
                "log2 of the loss scale",
                tuple(
                    course_of(names[at], np.log2(live.scale[:, at, :1]))
                    for at in (0, model, sixteenth, names.index("Headroom"))
                ),
            ),
        ),
        measured={
            f"{kind} {name}": rates[kind][at].tolist() for at, name in enumerate(names) for kind in ("trace", "live")
        }
        | {f"mean log2 scale {name}": mean_log[at].tolist() for at, name in enumerate(names)}
        | {f"flushed {name}": flushed[at].tolist() for at, name in enumerate(names)},
    )


def interval(skipped: np.ndarray, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a rate, from bools of any shape."""
    n, p = skipped.size, float(skipped.mean())
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _both(trace: course.TrainingCurves, live: course.TrainingCurves) -> tuple[tuple[str, course.TrainingCurves], ...]:
    return ("trace", trace), ("live", live)


def _interval(bounds: tuple[float, float]) -> str:
    return f"[{100 * bounds[0]:.2f}, {100 * bounds[1]:.2f}]"


EXPERIMENT = Experiment(NAME, "strategies that look ahead, on one trace and live", 2000, run)
