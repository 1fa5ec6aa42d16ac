"""How many steps the next call takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import scaler
from loops.loop.visit import Action

SECONDS = 0.25
"""The time between two visits, so that a bar moves, and Ctrl-C is answered, several times a second."""
MOST = 1_000
"""The most steps of one call: their outputs stay in memory until the visit, and may include histograms."""
_GROWTH = 4


class Pace:
    """Steps per call: the user's number, or as many as take a quarter of a second.

    The first call takes one step, so that its output or its error comes at once. Its time is mostly that of tracing, so
    the second call takes one step, too. From then on calls grow, at most fourfold each, until they last long enough.

    Args:
        steps_per_call: The user's number, or None to choose it by time.

    Attributes:
        chooses: Whether the number is chosen by time.
        steps: The most steps that the next call takes.
    """

    def __init__(self, steps_per_call: int | None):
        self.chooses = steps_per_call is None
        self.steps = steps_per_call or 1
        self._traced = False

    def fix_at_one(self) -> None:
        """Each call takes one step from now on."""
        self.chooses, self.steps = False, 1

    def record(self, steps: int, seconds: float) -> None:
        """Adjusts the next call to the time of the last one.

        Args:
            steps: Steps of the last call.
            seconds: Their time, without that of the visit.
        """
        if not self.chooses or not steps:
            return
        if self._traced:
            in_time = int(SECONDS * steps / seconds) if seconds > 0 else MOST
            self.steps = max(1, min(in_time, _GROWTH * self.steps, MOST))
        self._traced = True

    def limit(self, done: int, goal: int, actions: Iterable[Action]) -> int:
        """How many steps the next call may take.

        A call whose length is chosen by time ends at the next step at which an action is due, so that checkpoints and
        evaluations happen at the same steps on every machine. One of a fixed length ends there only for actions with
        the attribute `must_visit`.

        Args:
            done: Batches taken so far.
            goal: The number of batches at which the run ends.
            actions: The loop's. Those that act at certain steps have a method `next_visit`.

        Raises:
            scaler.InvalidArgument: If a `next_visit` returns something else than an integer or None.
        """
        last = min(goal, done + self.steps)
        acting = [one for one in actions if hasattr(one, "next_visit")]
        asking = acting if self.chooses else [one for one in acting if getattr(one, "must_visit", False)]
        asked = (_next_visit(action, done) for action in asking)
        # A call of no steps would never end the run.
        return min([last, *(step for step in asked if step is not None and step > done)]) - done


def _next_visit(action: Any, done: int) -> int | None:
    step = action.next_visit(done)
    if step is None:
        return None
    if not isinstance(step, (int, np.integer)) or isinstance(step, bool):
        raise scaler.InvalidArgument(
            f"{type(action).__name__}.next_visit({done}) returned {step!r}: expected the number of a step, an integer, "
            "or None where any visit will do."
        )
    return int(step)
