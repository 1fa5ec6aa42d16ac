"""The smallest static loss scale that trains as well as float32."""

from __future__ import annotations

import numpy as np

import scaler
from benchmarks.effects import course, networks
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent

NAME = "static-scale"
_EXPONENTS = tuple(range(0, 25, 2))
_FACTORS = (-24, -20, -16, 0)
_ENOUGH = 0.01
"""The accuracy below float32 that still counts as matching."""


def run(seeds: int = 3, steps: int = 400) -> Effect:
    """Trains at static scales, on losses multiplied by powers of two.

    Args:
        seeds: The number of networks for each scale.
        steps: The steps of each run.
    """
    cases = [(factor, exponent) for factor in _FACTORS for exponent in _EXPONENTS]
    seen = course.train(
        [scaler.Static(2.0**exponent) for _, exponent in cases],
        factors=[2.0**factor for factor, _ in cases],
        seeds=seeds,
        steps=steps,
        twin=True,
    )
    exact = course.train(
        [scaler.NoScaling()], seeds=seeds, steps=steps, forward_rounding=networks.exact, rounding=networks.exact
    )
    shape = (len(_FACTORS), len(_EXPONENTS), seeds)
    accuracy = seen.accuracy.reshape(shape)
    applied = ~seen.skipped
    flushed = np.where(applied, seen.flushed, 0).sum(axis=0) / np.maximum(applied.sum(axis=0), 1)
    skipped = seen.skipped.mean(axis=0).reshape(shape)
    flushed = np.where(skipped < 1, flushed.reshape(shape), np.nan)
    matches = accuracy.mean(axis=2) >= exact.accuracy.mean() - _ENOUGH
    least: list[int | None] = [_EXPONENTS[int(np.argmax(row))] if row.any() else None for row in matches]
    words = ["none" if exponent is None else f"2^{exponent}" for exponent in least]
    rows = [
        (
            f"2^{exponent}",
            *(
                "skips every step" if skipped[i, j].min() == 1 else percent(accuracy[i, j])
                for i in range(len(_FACTORS))
            ),
        )
        for j, exponent in enumerate(_EXPONENTS)
    ]
    found = ", ".join(f"{word} for a loss times 2^{factor}" for word, factor in zip(words, _FACTORS, strict=True))
    at_least = np.array([flushed[i, _EXPONENTS.index(e)] for i, e in enumerate(least[:3]) if e is not None])
    known = [exponent for exponent in least if exponent is not None]
    moves = np.diff(known[:3]) if len(known) == len(least) else np.array([np.inf])
    return Effect(
        **described(NAME, accuracy=percent(exact.accuracy)),
        seeds=seeds,
        steps=steps,
        beside=(("smallest scale that matches float32", "8 (SSD), 128 (bigLSTM)", found),),
        columns=("scale", *(f"accuracy, loss times 2^{factor}" for factor in _FACTORS)),
        rows=tuple(rows),
        claims=(
            Claim("a smallest scale matches, as for SSD and bigLSTM.", None not in least),
            Claim(
                "where the loss is small, times 2^-24, a scale of 1 learns nothing, as SSD diverges there.",
                bool(accuracy[0, 0].max() < exact.accuracy.min() - 0.1),
            ),
            Claim(
                "the smallest scale rises by as many octaves as the loss falls, to within the two between scales.",
                bool((np.abs(moves + 4) <= 2).all()),
                published=False,
            ),
            Claim(
                "at that scale float16 flushes less than a tenth of the gradients of activations "
                f"({100 * at_least.min():.0f} to {100 * at_least.max():.0f} % on small losses).",
                bool(at_least.max() < 0.1),
                published=False,
            ),
            Claim(
                "the digits at their natural loss need a scale, as SSD and bigLSTM do.",
                least[-1] not in (None, 0),
                published=False,
            ),
        ),
        panels=(
            Panel(
                "held-out accuracy",
                "log2 of the loss scale",
                "share",
                tuple(curve(f"loss times 2^{factor}", _EXPONENTS, accuracy[at]) for at, factor in enumerate(_FACTORS)),
                reference=(float(exact.accuracy.mean()), "float32"),
            ),
            Panel(
                "gradients of activations flushed",
                "log2 of the loss scale",
                "share of those that are not zero",
                tuple(curve(f"loss times 2^{factor}", _EXPONENTS, flushed[at]) for at, factor in enumerate(_FACTORS)),
            ),
        ),
        measured={"accuracy float32": exact.accuracy[0].tolist()}
        | {
            f"{kind} 2^{factor} at 2^{exponent}": values[i, j].tolist()
            for kind, values in (("accuracy", accuracy), ("flushed", flushed), ("skipped", skipped))
            for i, factor in enumerate(_FACTORS)
            for j, exponent in enumerate(_EXPONENTS)
        },
    )


EXPERIMENT = Experiment(NAME, "the smallest static scale that matches float32", 400, run)
