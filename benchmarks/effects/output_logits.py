"""Output logits that drift away at high learning rates, with and without z-loss."""

from __future__ import annotations

import numpy as np

from benchmarks.effects import zero_layers
from benchmarks.effects.adam_copies import CLIPPED, Setup
from benchmarks.effects.effect import Found, Line, curve, curves, flat, spread
from benchmarks.effects.small_transformer import WARM, sensitivity
from benchmarks.effects.zero_layers import Runs

RATES = (1e-2, 3e-2, 1e-1, 3e-1)
_NONE, _Z_LOSS, _DECAY = WAYS = ("neither", "z-loss", "weight decay")
_COEFFICIENT, _WEIGHT_DECAY = 1e-4, 1e-4
_BETA_2 = 0.95
_PUBLISHED_RATE = 0.1
_NEAR = 1.0
"""What counts as close to 0, and by how much two courses of log Z differ that have parted."""
_POINTS = 40
"""The points of a curve over steps."""


def run(seeds: int, steps: int) -> Found:
    """Trains transformers of no layers at four learning rates: with z-loss, with weight decay, and with neither.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    settings = {_NONE: (0.0, 0.0), _Z_LOSS: (_COEFFICIENT, 0.0), _DECAY: (0.0, _WEIGHT_DECAY)}
    setups = [Setup(rate, _BETA_2, way=CLIPPED, decay=settings[way][1] / rate) for way in WAYS for rate in RATES]
    coefficients = [settings[way][0] for way in WAYS for _ in RATES]
    return found_of(zero_layers.train(setups, coefficients, seeds=seeds, steps=steps), steps)


def found_of(runs: Runs, steps: int) -> Found:
    """What its runs show: for each of `WAYS` each of `RATES`.

    Args:
        runs: The runs.
        steps: The steps of each run.
    """
    own = {way: slice(number * len(RATES), (number + 1) * len(RATES)) for number, way in enumerate(WAYS)}
    late = slice(-max(1, len(runs.log_z) // 10), None)
    log_z, logit = (
        {way: values[late, part].mean(axis=0) for way, part in own.items()} for values in (runs.log_z, runs.logit)
    )
    probability = np.array([(logit[way] - log_z[way]).mean(axis=1) for way in WAYS])
    ends = {way: runs.end[part] for way, part in own.items()}
    cost = {way: runs.rounded[part] - ends[way] for way, part in own.items()}
    sensitive = {way: sensitivity(ends[way], runs.first[part][0]) for way, part in own.items()}
    at = RATES.index(_PUBLISHED_RATE)
    plain, held, decayed = log_z.values()
    at_rate = {way: runs.log_z[:, part][:, at] for way, part in own.items()}
    nearer = (np.abs(decayed) < np.abs(plain)).sum(axis=1)
    parted, half = _apart(at_rate[_NONE], at_rate[_Z_LOSS], steps)
    rise, rise_z, _ = (values[-1].mean() - values[0].mean() for values in ends.values())
    return Found(
        words={
            "warm": WARM,
            "first_log_z": runs.log_z[0].mean(),
            "least_probability": probability.min(),
            "most_probability": probability.max(),
            "mean_plain": plain[at].mean(),
            "mean_held": held[at].mean(),
            "plain": plain[at],
            "held": held[at],
            "logit": logit[_NONE][at],
            "parted": _steps(parted),
            "half": _steps(half),
            "sensitive": sensitive,
            "rise": rise,
            "rise_z": rise_z,
            "cost": max(values.mean(axis=1).max() for values in cost.values()),
            "nearer": ", ".join(
                f"in {nearer[row]} of {plain.shape[1]} seeds at {RATES[row]:g}" for row in range(at, len(RATES))
            ),
        },
        rows=(
            (f"{rate:g}", way, log_z[way][row], ends[way][row], cost[way][row])
            for row, rate in enumerate(RATES)
            for way in WAYS
        ),
        holds={
            "down": np.diff(plain.mean(axis=1)) < 0,
            "below": plain[at] < 0,
            "late": _late(parted, half, steps) if (plain[at] < 0).all() else None,
            "aim": np.abs(held[at]) <= _NEAR,
            "nearer": np.abs(held[at:]) < np.abs(plain[at:]),
            "decay": np.abs(decayed[at:]).mean(axis=1) < np.abs(plain[at:]).mean(axis=1),
            "sensitive": sensitive[_Z_LOSS] < sensitive[_NONE],
        },
        lines=[
            curves(RATES, log_z),
            [_course(way, values, steps) for way, values in at_rate.items()],
            curves(RATES, ends),
        ],
        measured=flat(
            {
                f"{what} {way}": values[way]
                for what, values in (("log Z", log_z), ("logit", logit), ("loss", ends), ("cost in bfloat16", cost))
                for way in WAYS
            },
            [f"{rate:g}" for rate in RATES],
        )
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()}
        | {
            f"step at which log Z has parted from that with z-loss at {_PUBLISHED_RATE}": parted.tolist(),
            f"step at which it has half of its distance at {_PUBLISHED_RATE}": half.tolist(),
        },
    )


def _apart(plain: np.ndarray, held: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The steps from which log Z is more than `_NEAR`, and half of the distance in the end, below that with z-loss.

    Args:
        plain: log Z of each record without z-loss, [records, seeds].
        held: The same with it.
        steps: The steps of each run.

    Returns:
        Both for good, [seeds] each; NaN if they are not apart in the end.
    """
    distance = _smoothed(held) - _smoothed(plain)
    last = distance[-max(1, len(distance) // 10) :].mean(axis=0)
    found = []
    for least in (_NEAR, last / 2):
        below = len(distance) - (distance[::-1] <= least).argmax(axis=0)
        first = np.where((distance > least).all(axis=0), 0, below)
        found.append(np.where(last > _NEAR, (first + 0.5) * steps / len(distance), np.nan))
    return found[0], found[1]


def _late(parted: np.ndarray, half: np.ndarray, steps: int) -> bool | None:
    """Whether both lie in the second half of the run, in each seed; None if only one does, or nothing parts."""
    late = [bool((values > steps / 2).all()) for values in (parted, half)]
    if not np.isfinite(parted).all():
        return None
    return late[0] if late[0] == late[1] else None


def _steps(known: np.ndarray) -> str:
    known = known[np.isfinite(known)]
    return f"step {spread(known, '.0f')}" if len(known) else "in none"


def _smoothed(by_record: np.ndarray) -> np.ndarray:
    """Records [records, seeds], each a mean with its neighbours, so that curves can be told apart, [points, seeds]."""
    parts = np.array_split(np.asarray(by_record), min(_POINTS, len(by_record)))
    return np.array([part.mean(axis=0) for part in parts])


def _course(label: str, by_record: np.ndarray, steps: int) -> Line:
    means = _smoothed(by_record)
    return curve(label, (np.arange(len(means)) + 0.5) * steps / len(means), means)
