"""Calls a user's function at a given cadence."""

from __future__ import annotations

from collections.abc import Callable

import scaler
from loops.loop.cadence import Cadence, Seconds
from loops.loop.visit import Visit


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
        if not callable(function):
            raise scaler.InvalidArgument(f"Call({function!r}): expected a function that takes a Visit.")
        self._function, self._cadence = function, Cadence("Call", every)

    def next_visit(self, done: int) -> int | None:
        """The next step after `done` at which the action is due; None for a cadence in seconds."""
        return self._cadence.next_visit(done)

    def __call__(self, visit: Visit) -> None:
        """Calls the function, if it is due."""
        if self._cadence.due(visit):
            self._function(visit)
