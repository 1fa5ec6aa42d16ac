"""What an action gets at a visit, how often it acts, and how many steps lie between two visits.

`every=10` means the steps 10, 20, 30, ..., counted in batches as `Loop.run` counts, whatever `steps_per_call` is. The
outputs of every step reach the host, so the writers `JsonLines`, `Csv` and `TensorBoard` write exactly these steps.
Everything else is known only at a visit: the other actions act at the first visit at or after such a step, once even if
the call contains several of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import scaler
from loops.loop.results import Counters
from loops.support.errors import check, is_count


@dataclasses.dataclass(frozen=True)
class Visit:
    """What an action gets each time the loop visits the host.

    Attributes:
        counters: The counts after the steps reported here.
        outputs: The values of each scalar output of the train step over the steps since the last visit: arrays
            [steps].
        seconds: Wall time since `run` began.
        goal: The value of `counters.data` at which the run ends.
        vectors: The same for outputs that are not scalars: arrays [steps, ...].
    """

    counters: Counters
    outputs: Mapping[str, np.ndarray]
    seconds: float
    goal: int
    vectors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> int:
        """The number of the first step reported here, counted from 1 in batches."""
        return self.counters.data - len(next(iter(self.outputs.values()))) + 1


Action = Callable[[Visit], object]


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
        check(
            f"{action}(every={every!r})",
            is_count(every) or isinstance(every, Seconds),
            "an integer of at least 1, in steps, or hs.Seconds(60)",
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


_SECONDS = 0.25
"""The time between two visits, so that a bar moves, and Ctrl-C is answered, several times a second."""
MOST_STEPS = 1_000
"""The most steps of one call: their outputs stay in memory until the visit, and may include histograms."""
_FASTEST_GROWTH = 4


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
            in_time = int(_SECONDS * steps / seconds) if seconds > 0 else MOST_STEPS
            self.steps = max(1, min(in_time, _FASTEST_GROWTH * self.steps, MOST_STEPS))
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
