"""What a log with some of a run's steps leaves open about its skips. A trace may be part of the log.

Reduces long curves to a few points without losing extremes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
    remedy = "keep the hs.Trace from the first step on" if found.traced else "add an hs.Trace, which has all of them"
    return f"{said}; {run}, {which}. To learn why, log every step, or {remedy}."


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number:,}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


class Envelope(NamedTuple):
    """The range of a curve in each column of pixels that has a value.

    Attributes:
        x: Float [columns], the middle of the column, from 0 to 1.
        low: Float [columns], the smallest value in it.
        high: Float [columns], the largest value in it.
        broken: Bool [columns], whether there is a gap before it.
    """

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    broken: np.ndarray


def envelope(x: np.ndarray, values: np.ndarray, columns: int) -> Envelope:
    """The smallest and the largest value in each column.

    Args:
        x: Float [points], from 0 to 1, in order.
        values: Float [points]; NaN leaves a gap.
        columns: The number of columns. A curve with fewer points keeps all of them.
    """
    known = ~np.isnan(values)
    if len(x) <= columns:
        gap = np.concatenate([[False], ~known[:-1]])[known] if len(x) else np.zeros(0, bool)
        return Envelope(x[known], values[known], values[known], gap)
    place = np.minimum((x * columns).astype(np.int64), columns - 1)
    first = np.flatnonzero(np.diff(place, prepend=-1))
    low = np.fmin.reduceat(values, first)
    high = np.fmax.reduceat(values, first)
    there = ~np.isnan(low)
    gap = np.concatenate([[False], ~there[:-1]])[there]
    return Envelope((place[first][there] + 0.5) / columns, low[there], high[there], gap)


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """A centred mean of the finite values among `width` points, or one more if that is even; NaN if there are none."""
    half = width // 2
    finite = np.pad(np.isfinite(values), half)
    many = _moving_sum(finite.astype(np.float64), 2 * half + 1)
    # A power of two takes no digits away, and keeps the sum of the largest numbers finite.
    small = 0.5 ** int(2 * half + 1).bit_length()
    sums = _moving_sum(np.where(finite, np.pad(values, half), 0.0) * small, 2 * half + 1)
    return np.where(many > 0, sums / np.maximum(many, 1) / small, np.nan)


def _moving_sum(values: np.ndarray, width: int) -> np.ndarray:
    """The sum of each `width` neighbours, without a difference of sums, in which one huge value would hide the others.

    A window is the end of one block of `width` values and the beginning of the next, by van Herk (1992).
    """
    count = len(values) - width + 1
    blocks = np.pad(values, (0, -len(values) % width)).reshape(-1, width)
    ends = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].reshape(-1)
    begins = np.cumsum(blocks, axis=1).reshape(-1)
    first = np.arange(count)
    return ends[:count] + np.where(first % width, begins[first + width - 1], 0.0)


def sampled(length: int, most: int) -> np.ndarray:
    """Int64: up to `most` evenly spaced indices into `length` points, including the first and the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.int64))
