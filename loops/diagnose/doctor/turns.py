"""Times of two ways to do one thing, measured by turns: a machine is slower in one minute than in the next."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

_WARM_UP = 2
_FEWEST, _MOST = 9, 400
_LONGEST, _FEWEST_OF_LONG = 60.0, 3
"""Seconds after which so many rounds are enough."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of two values or more."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Two ways that took turns.

    Attributes:
        before: Milliseconds of the first.
        after: Milliseconds of the second.
        ratio: Of the second by the first, within each round.
    """

    before: Spread
    after: Spread
    ratio: Spread

    def of_one(self, count: int) -> Turns:
        """The same for one of the `count` steps that each call took."""
        before, after = (
            Spread(one.median / count, one.low / count, one.high / count) for one in (self.before, self.after)
        )
        return Turns(before, after, self.ratio)

    @property
    def verdict(self) -> str:
        """Where three quarters of the rounds say so "faster" or "slower", else "the same": it is within the noise."""
        if self.ratio.high < 1:
            return "faster"
        return "slower" if self.ratio.low > 1 else "the same"


def take_turns(before: Callable[[], object], after: Callable[[], object], seconds: float) -> Turns:
    """Calls two functions by turns, the one first in even rounds and the other in odd ones.

    Args:
        before: Returns when its work is done: what it computed was read.
        after: Likewise.
        seconds: For how long, warm-up aside; there are nine rounds at least, and three if nine take over a minute.
    """
    for _ in range(_WARM_UP):
        before()
        after()
    taken: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while _wants_more(len(taken[0]), time.perf_counter() - start, seconds):
        for place in (0, 1) if len(taken[0]) % 2 == 0 else (1, 0):
            taken[place].append(milliseconds((before, after)[place]))
    ratios = [second / first for first, second in zip(*taken, strict=True)]
    return Turns(Spread.of(taken[0]), Spread.of(taken[1]), Spread.of(ratios))


def _wants_more(rounds: int, passed: float, seconds: float) -> bool:
    if rounds < (_FEWEST if passed < _LONGEST else _FEWEST_OF_LONG):
        return True
    return passed < seconds and rounds < _MOST


def milliseconds(function: Callable[[], object]) -> float:
    """How long a function takes, in milliseconds."""
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)
