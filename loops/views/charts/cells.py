"""The cells of a heat map: what the largest magnitude of each tensor was over some steps."""

from __future__ import annotations

import itertools

import numpy as np

from loops.record.run import Measured

NOT_MEASURED, ALL_ZERO, NOT_A_NUMBER, INFINITE = 0, 1, 2, 3
FIRST = 4
"""The byte of the lowest exponent of a cell."""
LOWEST, HIGHEST = -123, 128
"""The range of exponents in a cell; others are clipped to it."""


def heat_cells(measured: Measured, kept: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The cells of some tensors.

    Args:
        measured: The measured tensors of a run.
        kept: Indices of the tensors, int64 [tensors].
        columns: The most columns; each stands for as many steps.

    Returns:
        Int64 [columns], the first step of each, and uint8 [tensors, columns] as of `cells_of`, or `NOT_MEASURED`.
    """
    count = len(measured.step)
    edges = np.unique(np.linspace(0, count, min(columns, count) + 1).astype(np.int64))
    cells = [
        np.where(
            measured.missing[start:end, kept].all(axis=0), NOT_MEASURED, cells_of(measured.amax[start:end, kept])
        ).astype(np.uint8)
        for start, end in itertools.pairwise(edges)
    ]
    return measured.step[edges[:-1]], np.stack(cells, 1)


def cells_of(amax: np.ndarray) -> np.ndarray:
    """A byte for each tensor: its largest magnitude over some steps.

    Args:
        amax: Float32 [steps, tensors].

    Returns:
        Uint8 [tensors]: the exponent, offset by `FIRST`; or `ALL_ZERO`, `NOT_A_NUMBER` or `INFINITE`.
    """
    broken, infinite = np.isnan(amax).any(axis=0), np.isinf(amax).any(axis=0)
    largest = np.where(np.isfinite(amax), amax, 0.0).max(axis=0)
    _, exponent = np.frexp(largest)
    found = np.clip(exponent - 1, LOWEST, HIGHEST) - LOWEST + FIRST
    found = np.where(largest == 0, ALL_ZERO, found)
    found = np.where(infinite, INFINITE, found)
    return np.where(broken, NOT_A_NUMBER, found).astype(np.uint8)
