"""Unit scaling against a loss scale: what float16 and float8 flush without one, and what it costs."""

from __future__ import annotations

import numpy as np

import scaler
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent, spread, with_range
from benchmarks.effects.unit_runs import BATCH, BLOCKS, CONTEXT, WIDTH, Course, UnitRuns, Way

NAME = "unit-scaling"
_RATES = {False: 1e-2, True: 5e-2}
"""Adam's learning rate: of the ordinary network, and of the unit-scaled one."""
_EXPONENTS = range(-34, 6)
_FORMATS = {"float16": "float16", "float8_e5m2": "E5M2", "float8_e4m3fn": "E4M3"}
_NORMAL = -0.57
"""Log2 of the median magnitude of a normal law of variance 1: 0.674."""
_NEAR = 0.01
"""Nats: what counts as no worse, on the mean of the differences seed by seed. A yardstick of this page's own."""
_PLAIN, _UNIT = "ordinary", "unit-scaled"
_DYNAMIC = "float16, dynamic scale"
_Key = tuple[str, str]
_WAYS: dict[_Key, Way] = {
    (_PLAIN, "float32"): Way("float32", False, counted=True),
    (_PLAIN, "float16"): Way("mixed_float16", False),
    (_PLAIN, _DYNAMIC): Way("mixed_float16", False, scaler.Dynamic(growth_interval=50)),
    (_PLAIN, "float8"): Way("float32", False, cast=True),
    (_UNIT, "float32"): Way("float32", True, counted=True),
    (_UNIT, "float16"): Way("mixed_float16", True),
    (_UNIT, "float8"): Way("float32", True, cast=True),
}
_SHORT = {_DYNAMIC: "dynamic scale"}


def run(seeds: int = 5, steps: int = 100) -> Effect:
    """Trains the small transformer in each way.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    seen = {}
    for key, way in _WAYS.items():
        runs = UnitRuns(way, steps)
        seen[key] = [runs.run(seed, _RATES[way.unit]) for seed in range(seeds)]
    return effect_of(seen, seeds, steps)


def effect_of(seen: dict[_Key, list[Course]], seeds: int, steps: int) -> Effect:
    """The effect that these runs show.

    Args:
        seen: The runs of each way, one for each seed.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    losses = {key: np.array([each.loss for each in runs]) for key, runs in seen.items()}
    counts = {kind: np.array([each.counts for each in seen[kind, "float32"]]) for kind in (_PLAIN, _UNIT)}
    first, whole, last = (
        {kind: each[:, part].sum(axis=1) for kind, each in counts.items()}
        for part in (slice(0, 1), slice(None), slice(-1, None))
    )
    return Effect(
        **described(
            NAME,
            blocks=BLOCKS,
            width=WIDTH,
            context=CONTEXT,
            batch=BATCH,
            rate=_RATES[False],
            unit_rate=_RATES[True],
            near=_NEAR,
            flushed_unit=100 * _flushed(whole[_UNIT], "float8_e5m2").mean(),
            flushed_plain=100 * _flushed(whole[_PLAIN], "float8_e5m2").mean(),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "median gradient of activations at the first step",
                "a variance of 1, no median",
                "; ".join(f"{kind} {_power(_medians(first[kind]))}" for kind in first)
                + f"; a normal law of variance 1 has 2^{_NORMAL:.1f}",
            ),
            (
                "degradation in float16 without a loss scale",
                "none (BERT)",
                _difference(losses, (_UNIT, "float16"), (_UNIT, "float32")),
            ),
            (
                "degradation in float8 without any scale",
                "none (BERT)",
                _difference(losses, (_UNIT, "float8"), (_UNIT, "float32")),
            ),
        ),
        columns=("network", "format", "held-out loss", "skipped", *_headings()),
        rows=tuple(
            (
                *key,
                spread(losses[key], ".3f"),
                percent([each.skipped for each in runs]),
                *(
                    percent(_flushed(each[key[0]], to), ".2f") if _WAYS[key].counted else ""
                    for to in _FORMATS
                    for each in (first, whole)
                ),
            )
            for key, runs in seen.items()
        ),
        claims=_claims(losses, first, whole, last),
        panels=(
            Panel(
                "gradients of activations, first step",
                "log2 of the magnitude",
                "share of non-zero gradients",
                tuple(curve(kind, _EXPONENTS, _by_exponent(each)) for kind, each in first.items()),
                bounds=tuple((_flushed_below(to), f"flushed in {label}") for to, label in _FORMATS.items()),
            ),
            Panel(
                "flushed without a scale, whole run",
                "",
                "share of non-zero gradients",
                tuple(
                    curve(kind, range(len(_FORMATS)), np.array([_drawn(_flushed(each, to)) for to in _FORMATS]))
                    for kind, each in whole.items()
                ),
                log_y=10,
                ticks=tuple(_FORMATS.values()),
            ),
            Panel(
                "held-out loss",
                "",
                "nats above float32",
                tuple(
                    curve(
                        kind,
                        [at for at, key in enumerate(_WAYS) if key[0] == kind],
                        np.array([losses[key] - losses[kind, "float32"] for key in _WAYS if key[0] == kind]),
                    )
                    for kind in (_PLAIN, _UNIT)
                ),
                reference=(0.0, "its float32"),
                ticks=tuple(f"{'unit ' if kind == _UNIT else ''}{_SHORT.get(name, name)}" for kind, name in _WAYS),
            ),
        ),
        measured={f"loss {kind}, {name}": values.tolist() for (kind, name), values in losses.items()}
        | {
            f"flushed {label} {when} {kind}": _flushed(each[kind], to).tolist()
            for to, label in _FORMATS.items()
            for when, each in (("first step", first), ("run", whole), ("last look", last))
            for kind in each
        },
    )


def _headings() -> tuple[str, ...]:
    return tuple(f"flushed in {label}, {kind}" for label in _FORMATS.values() for kind in ("first step", "run"))


def _claims(
    losses: dict[_Key, np.ndarray],
    first: dict[str, np.ndarray],
    whole: dict[str, np.ndarray],
    last: dict[str, np.ndarray],
) -> tuple[Claim, ...]:
    """What is claimed.

    Args:
        losses: [seeds] for each way.
        first: Counts [seeds, bins] of the first step, for each kind of network.
        whole: The same of the whole run.
        last: The same of the last look at it.
    """
    medians = _medians(first[_UNIT])
    begins, ends = (_flushed(each[_UNIT], "float16") for each in (first, last))
    return (
        Claim(
            "unit-scaled gradients begin near one: their median is within two octaves (our bound) of that of a normal "
            "law of variance 1, in each seed.",
            bool((np.abs(medians - _NORMAL) <= 2).all()),
        ),
        *(
            Claim(
                f"{when} {label} flushes less than a tenth as much as in the ordinary network, in each seed.",
                bool((_flushed(each[_UNIT], to) < _flushed(each[_PLAIN], to) / 10).all()),
                published=False,
            )
            for to, label in (("float16", "float16"), ("float8_e5m2", "E5M2"))
            for when, each in (("at the first step", first), ("over the run", whole))
        ),
        Claim(
            "the constants hold on: float16 flushes at most twice as much at the last look as at the first step, in "
            f"each seed ({percent(ends, '.3f')} and {percent(begins, '.3f')}).",
            bool((ends <= 2 * np.maximum(begins, 1e-5)).all()),
            published=False,
        ),
        _no_worse(losses, (_UNIT, "float16"), (_UNIT, "float32")),
        _no_worse(losses, (_UNIT, "float16"), (_PLAIN, _DYNAMIC)),
        _no_worse(losses, (_UNIT, "float32"), (_PLAIN, "float32")),
        _no_worse(losses, (_UNIT, "float8"), (_UNIT, "float32")),
        Claim(
            "float8 costs the ordinary network more than the unit-scaled one, in each seed.",
            bool(
                (
                    losses[_PLAIN, "float8"] - losses[_PLAIN, "float32"]
                    > losses[_UNIT, "float8"] - losses[_UNIT, "float32"]
                ).all()
            ),
            published=False,
        ),
        _no_worse(losses, (_PLAIN, "float16"), (_PLAIN, _DYNAMIC), published=False),
        Claim(
            "ordinary float8 ends worse than ordinary float32 "
            f"({_difference(losses, (_PLAIN, 'float8'), (_PLAIN, 'float32'))}).",
            bool((losses[_PLAIN, "float8"] - losses[_PLAIN, "float32"]).mean() > _NEAR),
            published=False,
        ),
    )


def _no_worse(losses: dict[_Key, np.ndarray], one: _Key, other: _Key, published: bool = True) -> Claim:
    return Claim(
        f"{' '.join(one)} ends no worse than {' '.join(other)} ({_difference(losses, one, other)}).",
        bool((losses[one] - losses[other]).mean() <= _NEAR),
        published,
    )


def _nonzero(counts: np.ndarray) -> np.ndarray:
    return np.maximum(counts.sum(axis=1) - counts[:, scaler.observe.ZERO], 1)


def _flushed(counts: np.ndarray, to: str) -> np.ndarray:
    """The share of non-zero values that a format makes zero without a scale, [seeds]."""
    known = scaler.float_format(to)
    lost = np.array([scaler.observe.cast(each, known, 1.0).underflow.low for each in counts])
    return lost * counts.sum(axis=1) / _nonzero(counts)


def _flushed_below(to: str) -> float:
    """Log2 of what a format makes zero, and all that is smaller."""
    return float(np.log2(scaler.float_format(to).zero_threshold))


def _drawn(shares: np.ndarray) -> np.ndarray:
    """Without those that a logarithmic axis does not have."""
    return np.where(shares > 0, shares, np.nan)


def _by_exponent(counts: np.ndarray) -> np.ndarray:
    """Shares [exponents, seeds]."""
    return np.array([counts[:, scaler.observe.bin_of(exponent)] / _nonzero(counts) for exponent in _EXPONENTS])


def _medians(counts: np.ndarray) -> np.ndarray:
    """Log2 of the median of the non-zero magnitudes, as if they lay evenly within an octave, [seeds]."""
    lowest = scaler.observe.LOWEST
    found = []
    for row in counts[:, [scaler.observe.bin_of(exponent) for exponent in range(lowest, 128)]]:
        below = np.cumsum(row)
        at = int(np.argmax(2 * below >= below[-1]))
        found.append(lowest + at + float((below[-1] / 2 - (below[at] - row[at])) / max(row[at], 1)))
    return np.array(found)


def _power(exponents: np.ndarray) -> str:
    return with_range(*(f"2^{value:.1f}" for value in (exponents.mean(), exponents.min(), exponents.max())))


def _difference(losses: dict[_Key, np.ndarray], one: _Key, other: _Key) -> str:
    return spread(losses[one] - losses[other], "+.3f") + " nats"


EXPERIMENT = Experiment(NAME, "unit scaling against a loss scale, in float16 and float8", 100, run, seeds=5)
