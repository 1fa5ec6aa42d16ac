"""The gradient noise scale from what steps measured of it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

_KEPT = 0.99
"""How much of an average each further step keeps: it spans about a hundred measured steps."""


class Averages:
    """Averages of noise and signal over the last steps.

    The ratio of two estimates is biased and may be negative, so each is averaged by itself: McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1.
    """

    def __init__(self) -> None:
        self._sums, self._weight = (0.0, 0.0), 0.0

    def save_state(self) -> list[float]:
        """The averages, as JSON."""
        return [*self._sums, self._weight]

    def load_state(self, value: list[float]) -> None:
        """Restores what `save_state` returned."""
        noise, signal, self._weight = value
        self._sums = noise, signal

    def add(self, noise: float, signal: float) -> float:
        """The noise scale after a further step, see `noise_scale`. A step that is not finite is passed over."""
        if math.isfinite(noise) and math.isfinite(signal):
            old = self._sums
            self._sums = _KEPT * old[0] + noise, _KEPT * old[1] + signal
            self._weight = _KEPT * self._weight + 1.0
        noise, signal = self._sums
        return max(noise, 0.0) / signal if signal > 0 else math.nan


def noise_scale(noise: ArrayLike, signal: ArrayLike) -> np.ndarray:
    """The simple noise scale `B = tr(S) / |G|^2` of McCandlish et al. 2018, arXiv:1812.06162, in examples.

    Batches much smaller than it gain nearly the whole of each further example, larger ones little. It is the ratio of
    two averages with a decay of 0.99 a step.

    Args:
        noise: [steps], the column `noise_scale/noise` of a trace, an estimate of the trace of the covariance of one
            example's gradient; NaN or None where it was not measured.
        signal: [steps], the column `noise_scale/signal`, an estimate of the squared norm of the true gradient.

    Returns:
        Float64 [steps]. NaN where nothing was measured yet, and where the average signal is not above 0: then it takes
        more steps to tell.
    """
    averages = Averages()
    pairs = zip(np.asarray(noise, np.float64).tolist(), np.asarray(signal, np.float64).tolist(), strict=True)
    return np.array([averages.add(*pair) for pair in pairs], np.float64)
