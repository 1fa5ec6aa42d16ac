"""What the ready probes of a step measured, by name, for a trace and for curves; the gradient noise scale from that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from loops.step.probing import watched_by


def gauges_of(train_step: Any) -> list[str]:
    """The names of what a train step's ready probes measure, such as "update_rms/dense"; empty without them.

    Those of a part have its name before the layer's: "update_rms/critic/dense".

    Args:
        train_step: A loop's train step, after its first trace.
    """
    return [
        one.row(f"{output}/{name}")
        for one in watched_by(train_step)
        for output, names in getattr(one.watch, "gauges", {}).items()
        for name in names
    ]


def gauge_values(vectors: Mapping[str, np.ndarray], train_step: Any) -> np.ndarray:
    """Float32 [steps, gauges] in the order of `gauges_of`; NaN where a step was not measured.

    Args:
        vectors: Those of a visit.
        train_step: The visit's step, with ready probes.
    """
    watches = watched_by(train_step)
    return np.concatenate([vectors[one.output(output)] for one in watches for output in one.watch.gauges], axis=1)


def noise_pairs(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """For each step or part whose noise scale is measured its curve's name and those of its noise and its signal.

    Args:
        names: Of gauges.
    """
    noises = [name for name in names if name.startswith("noise_scale/") and name.endswith("/noise")]
    pairs = [(name.removesuffix("/noise"), name, f"{name.removesuffix('noise')}signal") for name in noises]
    return [pair for pair in pairs if pair[2] in names]


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
