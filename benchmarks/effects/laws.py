"""Laws of the magnitude of values, fitted to counts by exponent: log-normal, normal and Laplace.

Counts by exponent give the share of values below each power of two exactly, so a distance between distributions is
the largest one at a power of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

import scaler

EDGES = np.arange(scaler.observe.LOWEST, 129)
"""The exponents at which shares are known."""
LAWS = ("log-normal", "normal", "Laplace")
NORMAL_SPREAD = math.pi / (math.sqrt(8) * math.log(2))
"""The deviation of log2 |x| of a normal x, in octaves, whatever its size."""
_FINE = 16
"""Sizes that are tried for each octave."""
_ERF = np.vectorize(math.erf)


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
    """The share of the non-zero values below 2^exponent, for each of `EDGES`.

    Args:
        counts: Int64 [280], as `scaler.observe.exponents` returns them, with a non-zero value.
    """
    bins = [scaler.observe.bin_of(int(exponent)) for exponent in EDGES[:-1]]
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
    density, middles = np.diff(below), EDGES[:-1] + 0.5
    centre = float(density @ middles)
    # A uniform value within an octave adds a twelfth to the variance (Sheppard's correction).
    spread = math.sqrt(max(float(density @ (middles - centre) ** 2) - 1 / 12, 1 / 12))
    distance = _distance(below, _standard("log-normal", (EDGES - centre) / spread))
    return (
        Fit("log-normal", distance, centre, spread),
        _of_one("normal", below, centre),
        _of_one("Laplace", below, centre),
    )


def _of_one(law: str, below: np.ndarray, near: float) -> Fit:
    sizes = round(near) + np.arange(-8 * _FINE, 8 * _FINE + 1) / _FINE
    distances = np.abs(_standard(law, EDGES[None] - sizes[:, None]) - below).max(axis=1)
    best = int(distances.argmin())
    return Fit(law, float(distances[best]), float(sizes[best]), 1.0)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def _standard(law: str, exponent: np.ndarray) -> np.ndarray:
    """The share below 2^exponent for a law of size 1, or below `exponent` deviations for the log-normal one."""
    if law == "log-normal":
        return 0.5 * (1 + _ERF(exponent / math.sqrt(2)))
    magnitude = 2.0 ** np.minimum(exponent, 30.0)
    return _ERF(magnitude / math.sqrt(2)) if law == "normal" else -np.expm1(-magnitude)
