"""A run's figures behind the step from which a replay no longer follows the recorded run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from loops.replay.tallies import Lost


class Tail(NamedTuple):
    """The figures of a run's last steps, or the difference of two runs in them.

    Attributes:
        steps: The number of these steps.
        skips: How many of them are skipped.
        octaves: The mean of log2 of their scales.
        final: Log2 of the scale after the last step.
        floor: The share of these steps at the lowest scale.
        ceiling: The share of these steps at the highest scale.
        flushed: The share of the gradients that their scales flush to zero; NaN if it is unknown.
    """

    steps: int
    skips: float
    octaves: float
    final: float
    floor: float
    ceiling: float
    flushed: float

    def call_noninlined(self, other: Tail) -> Tail:
        """How far two tails of equal length lie apart: each figure's absolute difference."""
        return Tail(self.steps, *(abs(one - its) for one, its in zip(self[1:], other[1:], strict=True)))


def tail_of(
    scales: np.ndarray,
    skipped: np.ndarray,
    final: float,
    bounds: tuple[float, float],
    since: int,
    lost: Lost | None = None,
) -> Tail:
    """The figures from a step on.

    Args:
        scales: Float32 [steps].
        skipped: Bool [steps].
        final: The scale after the last step.
        bounds: The lowest and the highest scale of the strategy.
        since: The index of the first step that counts, below `steps`.
        lost: What these steps flush to zero; None if it is unknown.
    """
    used = scales[since:]
    return Tail(
        len(used),
        float(skipped[since:].sum()),
        float(np.log2(used.astype(np.float64)).mean()),
        float(np.log2(final)),
        float((used == bounds[0]).mean()),
        float((used == bounds[1]).mean()),
        lost.flushed / lost.values if lost is not None and lost.values else float("nan"),
    )
