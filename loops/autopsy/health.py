"""What a run's log says of it: which step to look at, and whether its skips are the harmless kind. Pure.

A scale that begins too high is halved until it fits: these skips are how it finds its level. Afterwards it grows every
so many applied steps, and is halved again where the larger one overflows: one skip for each interval. Both are meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

_MEANT = (None, "OVERFLOW")
_SHARE = 0.05
"""A growth interval of 20 steps, shorter than anyone sets it, has this share of skips."""
_STREAK = 3
"""Skips on end, after the scale had found its level, that no growth explains: a growth is one doubling."""


@dataclasses.dataclass(frozen=True)
class Health:
    """What a log shows.

    Attributes:
        step: The step to look at: the first of what went wrong last, or the last skip; None for a log without skips.
        healthy: Whether every skip is of the harmless kind.
        skips: How many steps were skipped.
        at_start: How many of them before the first step was applied.
        steps: How many steps there are.
    """

    step: int | None
    healthy: bool
    skips: int
    at_start: int
    steps: int


def health(rows: Sequence[Mapping[str, Any]]) -> Health:
    """Judges a run by the rows of its log.

    Args:
        rows: In the order of the steps, with "step", "applied" and, of a `TrainStep`, "attempted" and "cause".
    """
    attempts = [row for row in rows if row.get("attempted", True) and "applied" in row]
    streaks = _streaks(attempts)
    skips = sum(len(streak) for streak in streaks)
    at_start = len(streaks[0]) if streaks and attempts[0] is streaks[0][0] else 0
    later = streaks[1:] if at_start else streaks
    after_start = len(attempts) - at_start
    often = sum(len(streak) for streak in later) > max(_SHARE * after_start, 2)
    bad = [streak for streak in later if len(streak) >= _STREAK or often]
    bad += [streak for streak in streaks if any(row.get("cause") not in _MEANT for row in streak)]
    if at_start and at_start == len(attempts):
        bad.append(streaks[0])
    chosen = max(bad, key=lambda streak: streak[0]["step"]) if bad else (streaks[-1] if streaks else None)
    step = None if chosen is None else _telling(chosen)["step"]
    return Health(step, not bad, skips, at_start, len(rows))


def _streaks(attempts: Sequence[Mapping]) -> list[list[Mapping]]:
    """Skips on end."""
    streaks: list[list[Mapping]] = []
    before = True
    for row in attempts:
        if not row["applied"]:
            if before:
                streaks.append([])
            streaks[-1].append(row)
        before = row["applied"]
    return streaks


def _telling(streak: Sequence[Mapping]) -> Mapping:
    """The first skip that a scale too high does not explain, or else the last: where the scale had nowhere to go."""
    return next((row for row in streak if row.get("cause") not in _MEANT), streak[-1])
