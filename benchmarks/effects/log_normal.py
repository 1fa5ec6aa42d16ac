"""How far gradients of activations are from a log-normal law, and what it says of the share that a format flushes.

Counts by exponent give the share of values below each power of two exactly, so a distance between distributions is
the largest one at a power of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import keras
import numpy as np

import scaler
from benchmarks.effects.effect import Found, curves, flat, percent, spread
from benchmarks.effects.runs import Task, text, trained, visible
from loops import tasks

LAWS = ("log-normal", "normal", "Laplace")
NORMAL_SPREAD = math.pi / (math.sqrt(8) * math.log(2))
"""The deviation of log2 |x| of a normal x, in octaves, whatever its size."""
_LAPLACE_SPREAD = math.pi / (math.sqrt(6) * math.log(2))
"""The deviation of log2 |x| of a Laplace x, in octaves."""
_EDGES = np.arange(scaler.observe.LOWEST, 129)
"""The exponents at which shares are known."""
_FINE = 16
"""Sizes that are tried for each octave."""
_ERF = np.vectorize(math.erf)
_RATE = 1e-3
_EVERY = 20
_FORMAT = "float8_e4m3fn"
_FREE = (0, 4, 8)
"""Octaves that stay free above the largest gradient."""
_NEAR = 0.05
_DEVIATIONS = np.arange(-40, 26) / 10


class _Seen(NamedTuple):
    """Means over the tensors and the measured steps of a run.

    Attributes:
        distance: [laws], the statistic of Kolmogorov and Smirnov.
        nearest: [laws], the share of tensors to which the law is nearest.
        octaves: The deviation of log2 |gradient|.
        counted: [casts], the share of the non-zero gradients that the cast makes zero.
        fitted: [casts, laws], the same by each law.
        below: [deviations], the share that lies below so many deviations from the mean, on a log scale.
    """

    distance: np.ndarray
    nearest: np.ndarray
    octaves: float
    counted: np.ndarray
    fitted: np.ndarray
    below: np.ndarray


def run(seeds: int, steps: int) -> Found:
    """Trains the digits' CNN and the small transformer, and fits three laws to each tensor's gradients.

    Args:
        seeds: The number of networks of each kind.
        steps: The steps of each run.
    """
    networks = {"CNN": tasks.load("digits"), "transformer": text(context=32, width=32)}
    seen = {said: [_measure(task, seed, steps) for seed in range(seeds)] for said, task in networks.items()}
    distance, nearest, octaves, counted, fitted, below = (
        {said: np.array([getattr(one, field) for one in runs]) for said, runs in seen.items()}
        for field in _Seen._fields
    )
    error = {
        said: np.abs(np.log2(np.maximum(fitted[said], 1e-9) / counted[said][:, :, None])).mean(axis=0) for said in seen
    }
    names = [f"{free} free" for free in _FREE]
    rows: list[tuple] = []
    holds = {}
    for said in seen:
        near, others = distance[said][:, 0], distance[said][:, 1:]
        holds[f"near-{said}"] = near.mean() <= _NEAR
        holds[f"nearest-{said}"] = (near < others.min(axis=1)).all() and (nearest[said][:, 0] > 0.5).all()
        holds[f"share-{said}"] = (error[said][:, 0] <= 1) & (error[said][:, 0] < error[said][:, 1:].min(axis=1))
        rows += [
            (said, "distance", "", *(spread(each, ".3f") for each in distance[said].T)),
            (
                said,
                "deviation of log2, octaves",
                spread(octaves[said], ".1f"),
                "free",
                f"{NORMAL_SPREAD:.1f}",
                f"{_LAPLACE_SPREAD:.1f}",
            ),
            *(
                (said, f"flushed in E4M3, {name}", *(percent(each, ".2f") for each in (share, *by_law.T)))
                for name, share, by_law in zip(names, counted[said].T, fitted[said].swapaxes(0, 1), strict=True)
            ),
        ]
    # Of each network, counted and by each law, [casts, seeds].
    flushed = {
        said: {"counted": counted[said].T, **dict(zip(LAWS, fitted[said].transpose(2, 1, 0), strict=True))}
        for said in seen
    }
    by_name = {
        (said, name, law): each[at]
        for said in seen
        for at, name in enumerate(names)
        for law, each in flushed[said].items()
    }
    laws = {"distance": distance, "nearest": nearest}
    law = Fit("log-normal", 0.0, 0.0, 1.0)
    return Found(
        words={
            "worst": {said: 2.0 ** error[said][:, 0].max() for said in seen},
            "log_normal": {said: distance[said][:, 0] for said in seen},
            "first": {said: nearest[said][:, 0] for said in seen},
        },
        rows=rows,
        holds=holds,
        lines=[
            curves(range(len(LAWS)), {said: values.T for said, values in distance.items()}),
            curves(
                _DEVIATIONS,
                {
                    **{said: visible(values).T for said, values in below.items()},
                    "log-normal (published)": [[law.below(at)] for at in _DEVIATIONS],
                },
            ),
            curves(range(len(_FREE)), flushed["transformer"]),
        ],
        measured=flat({kind: {said: each[said].T for said in seen} for kind, each in laws.items()}, LAWS)
        | flat({"octaves": octaves, "flushed": by_name}),
    )


def _measure(task: Task, seed: int, steps: int) -> _Seen:
    optimizer, kinds = keras.optimizers.Adam(_RATE), ["activation_gradients"]
    visits = trained(task, seed, optimizer, steps, kinds=kinds, every=_EVERY).visits
    # Steps that are not measured have counts of 0, and so have gradients that nothing reads.
    counts = [
        row
        for visit in visits
        if 2 * visit.counters.attempted > steps
        for rows in visit.vectors["counts"]
        for row in rows
        if row[scaler.observe.ZERO + 1 :].any()
    ]
    fits = [fits_of(each) for each in counts]
    distance = np.array([[fit.distance for fit in each] for each in fits])
    lost = [[_lost(each, laws, free) for free in _FREE] for each, laws in zip(counts, fits, strict=True)]
    return _Seen(
        distance=distance.mean(axis=0),
        nearest=np.bincount(distance.argmin(axis=1), minlength=len(LAWS)) / len(distance),
        octaves=float(np.mean([laws[0].spread for laws in fits])),
        counted=np.mean([[one[0] for one in row] for row in lost], axis=0),
        fitted=np.mean([[one[1:] for one in row] for row in lost], axis=0),
        below=np.mean([_by_deviation(each, laws[0]) for each, laws in zip(counts, fits, strict=True)], axis=0),
    )


def _lost(counts: np.ndarray, laws: tuple[Fit, ...], free: int) -> list[float]:
    """The flushed share of the non-zero values: counted, then by each law."""
    to = scaler.float_format(_FORMAT)
    top = _EDGES[int(np.argmax(shares_below(counts) >= 1))]
    scale = math.floor(math.log2(to.max)) - int(top) - free
    # The largest scale has to be one that float32 can hold.
    scale = min(scale, 126)
    cast = scaler.observe.cast(counts, to, 2.0**scale)
    counted = cast.underflow.low * cast.values / (cast.values - int(counts[scaler.observe.ZERO]))
    return [counted, *(law.below(math.log2(to.zero_threshold) - scale) for law in laws)]


def _by_deviation(counts: np.ndarray, law: Fit) -> np.ndarray:
    return np.interp(_DEVIATIONS, (_EDGES - law.centre) / law.spread, shares_below(counts))


class Fit(NamedTuple):
    """A law for the values of one tensor.

    Attributes:
        law: One of `LAWS`.
        distance: The largest difference of the share of values below a power of two, counted and by the law: the
            statistic of Kolmogorov and Smirnov.
        centre: Of log2 of the magnitude: the mean of a log-normal law, the size of another.
        spread: The deviation of a log-normal law, in octaves; 1 for another law.
    """

    law: str
    distance: float
    centre: float
    spread: float

    def below(self, exponent: float) -> float:
        """The share of values whose magnitude is below 2 to the power of the exponent."""
        return float(_standard(self.law, np.array((exponent - self.centre) / self.spread)))


def shares_below(counts: np.ndarray) -> np.ndarray:
    """The share of the non-zero values below 2^exponent, for each of `_EDGES`.

    Args:
        counts: Int64 [280], as `scaler.observe.exponents` returns them, with a non-zero value.
    """
    bins = [scaler.observe.bin_of(int(exponent)) for exponent in _EDGES[:-1]]
    summed = np.concatenate([[0], np.cumsum(counts[bins])])
    return summed / summed[-1]


def fits_of(counts: np.ndarray) -> tuple[Fit, Fit, Fit]:
    """The laws that come nearest, in the order of `LAWS`.

    The log-normal law has the mean and the deviation of log2 of the magnitudes. A law of one number, its size, has that
    whose distance is smallest, so that it is not worse than by any other way to fit it.

    Args:
        counts: As in `shares_below`.
    """
    below = shares_below(counts)
    density, middles = np.diff(below), _EDGES[:-1] + 0.5
    centre = float(density @ middles)
    # A uniform value within an octave adds a twelfth to the variance (Sheppard's correction).
    width = math.sqrt(max(float(density @ (middles - centre) ** 2) - 1 / 12, 1 / 12))
    distance = float(np.abs(below - _standard("log-normal", (_EDGES - centre) / width)).max())
    return (
        Fit("log-normal", distance, centre, width),
        _of_one("normal", below, centre),
        _of_one("Laplace", below, centre),
    )


def _of_one(law: str, below: np.ndarray, near: float) -> Fit:
    sizes = round(near) + np.arange(-8 * _FINE, 8 * _FINE + 1) / _FINE
    distances = np.abs(_standard(law, _EDGES[None] - sizes[:, None]) - below).max(axis=1)
    best = int(distances.argmin())
    return Fit(law, float(distances[best]), float(sizes[best]), 1.0)


def _standard(law: str, exponent: np.ndarray) -> np.ndarray:
    """The share below 2^exponent for a law of size 1, or below `exponent` deviations for the log-normal one."""
    if law == "log-normal":
        return 0.5 * (1 + _ERF(exponent / math.sqrt(2)))
    magnitude = 2.0 ** np.minimum(exponent, 30.0)
    return _ERF(magnitude / math.sqrt(2)) if law == "normal" else -np.expm1(-magnitude)
