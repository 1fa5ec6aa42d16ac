"""How many steps the next call takes, where the user leaves it open."""

from __future__ import annotations

from collections.abc import Iterable

from loops.loop.visit import Action

SECONDS = 0.25
"""The time between two visits: a bar moves, and Ctrl-C is answered, several times a second."""
MOST = 1_000
"""Steps of one call. Its outputs stay in memory until the visit, and a step may return histograms of many tensors."""
_GROWTH = 4


class Pace:
    """Steps of a call: as many as the user says, or as many as take a quarter of a second.

    The first call takes one step, so that its output, or its error, comes at once. What it takes is mostly tracing and
    says nothing, so the second call takes one step, too. Then calls grow until they last long enough.

    Args:
        steps_per_call: The user's number, or None to choose.

    Attributes:
        chooses: Whether the number is chosen.
        steps: The most steps that the next call takes.
    """

    def __init__(self, steps_per_call: int | None):
        self.chooses = steps_per_call is None
        self.steps = steps_per_call or 1
        self._traced = False

    def hold(self) -> None:
        """Takes one step a call from now on."""
        self.chooses, self.steps = False, 1

    def took(self, steps: int, seconds: float) -> None:
        """Learns how long a call of so many steps took, without the time of its visit."""
        if not self.chooses or not steps:
            return
        if self._traced:
            in_time = int(SECONDS * steps / seconds) if seconds > 0 else MOST
            self.steps = max(1, min(in_time, _GROWTH * self.steps, MOST))
        self._traced = True

    def limit(self, done: int, goal: int, actions: Iterable[Action]) -> int:
        """How many steps the next call may take.

        A call whose length is chosen passes no step at which an action wants to see the host, so that checkpoints and
        evaluations happen at the same steps on every machine.

        Args:
            done: Batches taken so far.
            goal: Where the run ends.
            actions: The loop's; those that act at certain steps have a method `next_visit`.
        """
        last = min(goal, done + self.steps)
        if self.chooses:
            asked = (action.next_visit(done) for action in actions if hasattr(action, "next_visit"))
            last = min([last, *(step for step in asked if step is not None)])
        return last - done
