"""What counts of gradients by exponent say: how many are zero, and how many a format makes zero."""

from __future__ import annotations

import numpy as np

import scaler


def nonzero(counts: np.ndarray) -> np.ndarray:
    """The number of values other than zero, at least 1, of counts [seeds, bins]."""
    return np.maximum(counts.sum(axis=1) - counts[:, scaler.observe.ZERO], 1)


def by_exponent(counts: np.ndarray, exponents: range) -> np.ndarray:
    """The shares of non-zero values, [exponents, seeds]."""
    return np.array([counts[:, scaler.observe.bin_of(exponent)] / nonzero(counts) for exponent in exponents])


def flushed(counts: np.ndarray, to: str, scale: float = 1.0) -> np.ndarray:
    """The share of non-zero values that a format makes zero at a scale, [seeds]."""
    known = scaler.float_format(to)
    lost = np.array([scaler.observe.cast(each, known, scale).underflow.low for each in counts])
    return lost * counts.sum(axis=1) / nonzero(counts)


def visible(shares: np.ndarray) -> np.ndarray:
    """Without those that a logarithmic axis does not have."""
    return np.where(shares > 0, shares, np.nan)
