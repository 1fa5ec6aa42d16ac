"""What a log with some of a run's steps leaves open about its skips. A trace may be part of the log."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from loops.support.text import agreeing, amount


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a run counted itself, whatever it logged.

    Attributes:
        steps: The number of its steps.
        skips: How many of them were skipped.
    """

    steps: int
    skips: int


@dataclasses.dataclass(frozen=True)
class Thinned:
    """A log that lacks steps of its run.

    Attributes:
        logged: The number of steps in the log.
        last: The last of them.
        every: The number that all of them are a multiple of, or None.
        counted: What the run counted itself, or None if nothing in its folder says it.
        shown: How many of the skips that the run counted are in the log.
        traced: Whether steps of a trace are among those in the log.
        silent: Whether the log has more steps, of which it does not say whether they were applied.
    """

    logged: int
    last: int
    every: int | None
    counted: Counted | None
    shown: int = 0
    traced: bool = False
    silent: bool = False

    @property
    def unlogged(self) -> int | None:
        """How many skips are not in the log, or None if that is unknown."""
        return None if self.counted is None else max(self.counted.skips - self.shown, 0)

    @property
    def open(self) -> bool:
        """Whether there are, or may be, skips that the log does not show."""
        return self.unlogged != 0 or self.counted is None or self.counted.steps < self.last

    @property
    def what(self) -> str:
        """Which steps the log has, to follow "the log has"."""
        return f"every {_ordinal(self.every)} step" if self.every else f"{self.logged:,} of {amount(self.last, 'step')}"


def lacks_steps(steps: Sequence[int]) -> bool:
    """Whether a log with these steps, in order, lacks steps before its last."""
    return len(steps) > 0 and len(steps) < steps[-1]


def thinned(
    steps: Sequence[int],
    skipped: Sequence[int],
    counted: Counted | None,
    *,
    traced: bool = False,
    silent: bool = False,
) -> Thinned | None:
    """What is known of a log that lacks steps; None for one that has all steps up to its last.

    Args:
        steps: The steps in the log that say whether they were applied, in order.
        skipped: Those of them that were skipped.
        counted: What the run counted itself, if that is known.
        traced: Whether steps of a trace are among them.
        silent: Whether the log has more steps, which do not say it.
    """
    if not lacks_steps(steps):
        return None
    every = functools.reduce(math.gcd, map(int, steps))
    regular = every > 1 and len(steps) == steps[-1] // every
    shown = sum(step <= counted.steps for step in skipped) if counted else 0
    return Thinned(len(steps), int(steps[-1]), every if regular else None, counted, shown, traced, silent)


def said_of(found: Thinned) -> str:
    """What the log leaves open, as sentences."""
    record = "record" if found.traced else "log"
    said = f"The {record} has only {found.what}"
    if found.silent:
        said = f"The {record} says of only {found.what} whether they were applied"
    if found.counted is None or found.unlogged is None:
        return f"{said}, and nothing in the folder counts all skips: to know of all steps, log each of them."
    counted, logged = found.counted, "recorded" if found.traced else "logged"
    until = (
        f"{counted.steps:,}" if counted.steps >= found.last else f"the {counted.steps:,} up to its newest checkpoint"
    )
    if not counted.skips:
        return f"{said}; the run skipped none of {until}."
    run = f"the run skipped {counted.skips:,} of {until}"
    if not found.unlogged:
        return f"{said}; {run}, {agreeing(counted.skips, 'which is', 'all of them')} {logged}."
    none = agreeing(counted.skips, f"not {logged}", f"none of them {logged}")
    which = f"{found.unlogged:,} of them not {logged}" if found.shown else none
    remedy = (
        "keep the loops.Trace from the first step on" if found.traced else "add a loops.Trace, which has all of them"
    )
    return f"{said}; {run}, {which}. To learn why, log every step, or {remedy}."


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number:,}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
