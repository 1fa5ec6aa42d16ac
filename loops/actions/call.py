"""A user's own function at its own cadence."""

from __future__ import annotations

from collections.abc import Callable

import scaler
from loops.loop.cadence import Cadence, Seconds
from loops.loop.visit import Visit


class Call:
    """Calls a function every so often. A function that is to be called at each visit is an action as it is.

        loops.Call(lambda visit: print(visit.counters), every=loops.Seconds(60))

    Args:
        function: Takes a `Visit`, whose outputs are those since the visit before, whether that was due or not.
        every: Steps, or `Seconds`.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, function: Callable[[Visit], object], *, every: int | Seconds):
        if not callable(function):
            raise scaler.InvalidArgument(f"Call({function!r}): expected a function that takes a Visit.")
        self._function, self._cadence = function, Cadence("Call", every)

    def next_visit(self, done: int) -> int | None:
        """The next step at which it is to act, after `done` steps."""
        return self._cadence.next_visit(done)

    def __call__(self, visit: Visit) -> None:
        """Calls the function, if it is due."""
        if self._cadence.due(visit):
            self._function(visit)
