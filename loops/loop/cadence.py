"""How often an action acts: one meaning of `every=` for all of them.

`every=10` means the steps 10, 20, 30, ..., counted in batches as `Loop.run` counts, whatever `steps_per_call` is. The
outputs of every step reach the host, so the writers `JsonLines`, `Csv` and `TensorBoard` write exactly these steps.
Everything else is known only at a visit: the other actions act at the first visit at or after such a step, once even if
the call contains several of them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import scaler
from loops.support.checks import is_count


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A cadence in wall time: `every=loops.Seconds(60)`.

    Attributes:
        seconds: A finite number of at least 0.

    Raises:
        scaler.InvalidArgument: For anything else.
    """

    seconds: float

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not number or not math.isfinite(self.seconds) or self.seconds < 0:
            raise scaler.InvalidArgument(f"Seconds({self.seconds!r}): expected a finite number of at least 0.")


class Cadence:
    """Decides at which visits an action is due.

    In steps, at those that reach a multiple of `every`, so that a resumed run acts where an uninterrupted one would. In
    seconds, at the first visit after that time has passed.

    Args:
        action: Its name, for errors.
        every: An integer of at least 1, or `Seconds`.

    Raises:
        scaler.InvalidArgument: If `every` is neither.
    """

    def __init__(self, action: str, every: int | Seconds):
        if not is_count(every) and not isinstance(every, Seconds):
            raise scaler.InvalidArgument(
                f"{action}(every={every!r}): expected an integer of at least 1, in steps, or hs.Seconds(60)."
            )
        self._every = every
        self._seconds = 0.0
        self._data: int | None = None

    @property
    def in_seconds(self) -> bool:
        """Whether the cadence is in wall time."""
        return isinstance(self._every, Seconds)

    def due(self, visit: Any) -> bool:
        """Whether to act at this visit. Call it once per visit."""
        if isinstance(self._every, Seconds):
            if visit.seconds < self._seconds:  # Another run began.
                self._seconds = 0.0
            if visit.seconds - self._seconds < self._every.seconds:
                return False
            self._seconds = visit.seconds
            return True
        # The steps of a call that failed were counted, but never reported.
        before = visit.first - 1 if self._data is None else min(self._data, visit.first - 1)
        self._data = visit.counters.data
        return visit.counters.data // self._every > before // self._every

    def next_visit(self, done: int) -> int | None:
        """The first step after `done` at which to act, or None in wall time, where any visit will do."""
        return None if isinstance(self._every, Seconds) else (done // self._every + 1) * self._every

    def rows(self, visit: Any) -> list[int]:
        """The indices, in the arrays of the visit's outputs, of the steps to write; in seconds the last one only."""
        count = visit.counters.data - visit.first + 1
        if isinstance(self._every, Seconds):
            return [count - 1] if self.due(visit) else []
        return [place for place in range(count) if (visit.first + place) % self._every == 0]
