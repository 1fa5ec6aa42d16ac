"""Calls a function of the user's at a cadence: for its effect, or to end the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import scaler
from loops.loop.visit import Cadence, Seconds, Visit
from loops.support.errors import check

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class Call:
    """Calls a function at a given cadence. To call it at every visit, pass the function itself as an action.

        loops.Call(lambda visit: print(visit.counters), every=loops.Seconds(60))

    Args:
        function: Takes a `Visit`. Its outputs begin after the previous visit, whether that was due or not.
        every: A number of steps, or `Seconds`.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, function: Callable[[Visit], object], *, every: int | Seconds):
        check(f"Call({function!r})", scaler.authoring.takes_one(function), "a function that takes a Visit")
        self._function, self._cadence = function, Cadence("Call", every)

    def next_visit(self, done: int) -> int | None:
        """The next step after `done` at which the action is due; None for a cadence in seconds."""
        return self._cadence.next_visit(done)

    def __call__(self, visit: Visit) -> None:
        """Calls the function, if it is due."""
        if self._cadence.due(visit):
            self._function(visit)


class StopWhen:
    """Ends the run, as if its goal were reached, after the first visit for which a condition is true.

        loops.StopWhen(lambda visit: visit.seconds > 3600)

    The stop is not saved: a resumed run takes at least one call before the condition is evaluated again.

    Args:
        condition: A function from a `Visit` to a bool.
        every: Steps or `Seconds` between evaluations of the condition.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, condition: Callable[[Visit], object], *, every: int | Seconds = 1):
        check(f"StopWhen({condition!r})", scaler.authoring.takes_one(condition), "a function from a Visit to a bool")
        self._condition, self._cadence = condition, Cadence("StopWhen", every)
        self.stopped: str | None = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: forgets an earlier stop."""
        self.stopped = None

    def next_visit(self, done: int) -> int | None:
        """The next step after `done` at which the action is due; None for a cadence in seconds."""
        return self._cadence.next_visit(done)

    def __call__(self, visit: Visit) -> None:
        """Evaluates the condition, if it is due."""
        if not self._cadence.due(visit):
            return
        answer = np.asarray(self._condition(visit))
        good = answer.ndim == 0 and answer.dtype.kind in "biuf"
        check(f"StopWhen(condition): it returned {answer!r:.100}", good, "True or False, as of a call's last loss")
        if answer:
            self.stopped = f"StopWhen's condition was true at step {visit.counters.data}"
