"""Strategies that look ahead of an overflow: how often they skip, on one trace and live."""

from __future__ import annotations

import math

import numpy as np

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, course_of, curves, flat, percent

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


def run(seeds: int, steps: int) -> Found:
    """Counts the skips of each strategy while all see the same weights, and while each trains its own.

    Args:
        seeds: The number of networks for each strategy.
        steps: The steps of each run.
    """
    strategies = _strategies()
    names, given = list(strategies), list(strategies.values())
    trace = networks.train(given, seeds=seeds, steps=steps, shared=True)
    live = networks.train(given, seeds=seeds, steps=steps, twin=True)
    seen = {"trace": trace.skipped, "live": live.skipped}
    rates = {kind: skipped.mean(axis=0) for kind, skipped in seen.items()}
    bounds = {kind: [interval(skipped[:, at]) for at in range(len(names))] for kind, skipped in seen.items()}
    mean_log, flushed = np.log2(live.scale).mean(axis=0), np.nanmean(live.flushed, axis=0)
    model, published, sixteenth, eighth, headroom = range(1, 6)
    weights = float((trace.largest <= trace.amax)[~trace.skipped].mean())
    least = int(np.argmin(rates["live"].mean(axis=1)))
    skipped = [
        [
            f"{percent(rates[kind][at], '.2f')}, [{100 * low:.2f}, {100 * high:.2f}]"
            for at, (low, high) in enumerate(bounds[kind])
        ]
        for kind in seen
    ]
    return Found(
        words={
            "eighth": rates["live"][eighth].mean(),
            "published": rates["live"][published],
            "model": rates["live"][model],
            "weights": weights,
        },
        rows=zip(names, *skipped, mean_log, flushed, live.accuracy, strict=True),
        holds={
            "published": rates["trace"][published].mean() < _SKIPPED_AT_MOST,
            "repaired": rates["live"][model].mean() < _SKIPPED_AT_MOST,
            "edge": [rate[sixteenth].mean() <= rate[eighth].mean() for rate in rates.values()],
            "weights": weights > 0.9,
            "alike": [a[0] <= b[1] and b[0] <= a[1] for a, b in zip(bounds["trace"], bounds["live"], strict=True)],
            "useful": mean_log[published] > mean_log[model] - 4,
            "least": mean_log[least].mean() < mean_log[0].mean(),
        },
        lines=[
            curves(range(len(names)), rates),
            [course_of(names[at], np.log2(live.scale[:, at, :1])) for at in (0, model, sixteenth, headroom)],
        ],
        measured=flat({**rates, "mean log2 scale": mean_log, "flushed": flushed}, names),
    )


def interval(skipped: np.ndarray, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a rate, from bools of any shape."""
    n, p = skipped.size, float(skipped.mean())
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)
