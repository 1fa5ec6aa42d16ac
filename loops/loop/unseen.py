"""Steps that were applied although their loss is not finite: the run trains, but its loss curve shows nothing."""

from __future__ import annotations

import numpy as np

from loops.loop.counters import Counters
from loops.loop.visit import Visit


def of_applied(attempted: np.ndarray, applied: np.ndarray) -> np.ndarray:
    """Which batches moved the weights: those of applied steps, including every micro-batch of an applied window.

    Args:
        attempted: Bool [steps], whether a decision was taken.
        applied: Bool [steps].

    Returns:
        Bool [steps], False for batches of a window that these steps do not finish.
    """
    (decided,) = np.nonzero(attempted)
    following = np.searchsorted(decided, np.arange(len(attempted)))
    known = following < len(decided)
    found = np.zeros(len(attempted), bool)
    found[known] = applied[decided[following[known]]]
    return found


class UnseenLosses:
    """Finds the first step of a run that was applied although the loss that it returned is not finite.

    Args:
        takes_turns: Whether a loss of NaN means that nothing was computed, where no step was attempted.
    """

    def __init__(self, takes_turns: bool = False) -> None:
        self._takes_turns = takes_turns
        self._before = Counters()
        # The first step with a non-finite loss in the window that is still open after the last visit.
        self._waiting: int | None = None

    def first(self, visit: Visit) -> int | None:
        """The number of that step, or None if this visit has none."""
        loss = visit.outputs.get("loss")
        before, self._before = self._before, visit.counters
        if loss is None:
            return None
        if np.isfinite(loss).all() and self._waiting is None:
            return None
        attempted, applied = _decisions(visit, before)
        left_out = np.isnan(loss) & ~attempted if self._takes_turns else np.zeros(len(loss), bool)
        lost = [visit.first + int(row) for row in np.flatnonzero(~np.isfinite(loss) & ~left_out)]
        decided = np.flatnonzero(attempted)
        waiting = self._waiting
        if len(decided):
            self._waiting = None
            if waiting is not None and applied[decided[0]]:
                return waiting
        moved = of_applied(attempted, applied)
        ends = visit.first + (int(decided[-1]) if len(decided) else -1)
        self._waiting = self._waiting or next((step for step in lost if step > ends), None)
        return next((step for step in lost if moved[step - visit.first]), None)


def _decisions(visit: Visit, before: Counters) -> tuple[np.ndarray, np.ndarray]:
    """Which steps of a visit were attempted, and which applied; none of them applied if that is unknown."""
    steps = len(next(iter(visit.outputs.values())))
    attempted = visit.outputs.get("attempted", np.ones(steps, bool)).astype(bool)
    if "applied" in visit.outputs:
        return attempted, visit.outputs["applied"].astype(bool)
    now = visit.counters
    whole = now.known and now.skipped == before.skipped and now.attempted - before.attempted == steps
    return attempted, np.full(steps, whole and before.data == visit.first - 1)
