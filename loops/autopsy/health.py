"""What a run's log says of it: which step to look at, and whether its skips are the harmless kind. Pure.

A scale that begins too high is halved until it fits: these skips are how it finds its level. Afterwards it grows every
so many applied steps, and is halved again where the larger one overflows: one skip for each interval. Both are meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import scaler

_MEANT = (None, "OVERFLOW")
_STREAK = 5
"""Skips on end, after the first applied step, that a healthy run's gradients do not ask for: 32 times as large."""
_AT_END = 3
"""Skips on end with which no healthy run ends."""
_SHARE = 0.05
"""Skips among the steps of the second half: a growth interval of 20, shorter than anyone sets it, has as many."""
_LEAST = 3
"""Skips that make a share."""
_LOWEST = 1.0
"""A loss scale below this makes gradients smaller than they are, which no healthy float16 run needs."""


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
    at_start = len(streaks[0]) if streaks and attempts[0] is streaks[0][0] else 0
    bad = [streak for streak in streaks if _is_bad(streak, attempts)]
    if not bad and _often(attempts[len(attempts) // 2 :]):
        bad = streaks[-1:]
    step = None
    if streaks:
        step = (_telling(bad[-1]) if bad else streaks[-1][-1])["step"]
    return Health(step, not bad, sum(len(streak) for streak in streaks), at_start, len(rows))


def _is_bad(streak: Sequence[Mapping], attempts: Sequence[Mapping]) -> bool:
    at_start, at_end = streak[0] is attempts[0], streak[-1] is attempts[-1]
    return (
        any(_cause(row) not in _MEANT for row in streak)
        or (at_end and len(streak) >= _AT_END)
        or (not at_start and len(streak) >= _STREAK)
        or any((row.get("loss_scale") or _LOWEST) < _LOWEST for row in streak)
    )


def _often(attempts: Sequence[Mapping]) -> bool:
    skips = sum(not row["applied"] for row in attempts)
    return skips >= _LEAST and skips > _SHARE * len(attempts)


def _cause(row: Mapping) -> str | None:
    """The cause by name; `Csv` and programs of one's own write its number."""
    cause = row.get("cause")
    if isinstance(cause, int):
        return scaler.Cause(cause).name if cause in list(scaler.Cause) else None
    return cause


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
    """The first skip that a scale too high does not explain, or else the first: there the trouble is youngest."""
    return next((row for row in streak if _cause(row) not in _MEANT), streak[0])
