"""The smallest static loss scale that trains as well as float32."""

from __future__ import annotations

import numpy as np

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, curves, flat

_EXPONENTS = tuple(range(0, 25, 2))
_FACTORS = (-24, -20, -16, 0)
_ENOUGH = 0.01
"""The accuracy below float32 that still counts as matching."""


def run(seeds: int, steps: int) -> Found:
    """Trains at static scales, on losses multiplied by powers of two.

    Args:
        seeds: The number of networks for each scale.
        steps: The steps of each run.
    """
    cases = [(factor, exponent) for factor in _FACTORS for exponent in _EXPONENTS]
    seen = networks.train(
        [scaler.Static(2.0**exponent) for _, exponent in cases],
        factors=[2.0**factor for factor, _ in cases],
        seeds=seeds,
        steps=steps,
        twin=True,
    )
    exact = networks.train(
        [scaler.NoScaling()], seeds=seeds, steps=steps, forward_rounding=networks.exact, rounding=networks.exact
    ).accuracy
    shape = (len(_FACTORS), len(_EXPONENTS), seeds)
    accuracy, skipped = seen.accuracy.reshape(shape), seen.skipped.mean(axis=0).reshape(shape)
    applied = ~seen.skipped
    flushed = np.where(applied, seen.flushed, 0).sum(axis=0) / np.maximum(applied.sum(axis=0), 1)
    flushed = np.where(skipped < 1, flushed.reshape(shape), np.nan)
    matches = accuracy.mean(axis=2) >= exact.mean() - _ENOUGH
    least = [_EXPONENTS[int(np.argmax(row))] if row.any() else None for row in matches]
    at_least = np.array([flushed[i, _EXPONENTS.index(e)] for i, e in enumerate(least[:3]) if e is not None])
    known = [exponent for exponent in least if exponent is not None]
    moves = np.diff(known[:3]) if len(known) == len(least) else np.array([np.inf])
    sizes = [f"loss times 2^{factor}" for factor in _FACTORS]
    return Found(
        words={
            "accuracy": exact[0],
            "least": [("none" if exponent is None else f"2^{exponent}") for exponent in least],
            "low": 100 * at_least.min(),
            "high": at_least.max(),
        },
        rows=(
            (
                f"2^{exponent}",
                *("skips every step" if skipped[i, j].min() == 1 else accuracy[i, j] for i in range(len(_FACTORS))),
            )
            for j, exponent in enumerate(_EXPONENTS)
        ),
        holds={
            "matches": None not in least,
            "nothing": accuracy[0, 0].max() < exact.min() - 0.1,
            "moves": np.abs(moves + 4) <= 2,
            "flushed": at_least.max() < 0.1,
            "natural": least[-1] not in (None, 0),
        },
        lines=[curves(_EXPONENTS, dict(zip(sizes, each, strict=True))) for each in (accuracy, flushed)],
        measured=flat({"accuracy float32": exact[0]})
        | flat(
            {"accuracy": accuracy, "flushed": flushed, "skipped": skipped},
            [f"2^{factor} at" for factor in _FACTORS],
            [f"2^{exponent}" for exponent in _EXPONENTS],
        ),
    )
