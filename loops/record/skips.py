"""What a run's log says of it: which step to look at, and whether its skips are the harmless kind. Pure.

A scale that begins too high is halved until it fits: these skips are how it finds its level. Afterwards it grows every
so many applied steps, and is halved again where the larger one overflows: one skip for each interval, however short the
interval is. Both are meant. A run may skip now and then beside, where its gradients grow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loops.loop.unseen import of_applied
from loops.record.columns import cause_name
from loops.support.text import agreeing

_MEANT = ("", "OVERFLOW")
_STREAK = 5
"""Skips on end, after the first applied step, that a healthy run's gradients do not ask for: 32 times as large."""
_AT_END = 3
"""Skips on end with which no healthy run ends."""
SHARE = 0.05
"""Skips among the steps of the second half that follow no growth of the scale."""
_LEAST = 3
"""Skips that make a share."""
_LOWEST = 1.0
"""A loss scale below this makes gradients smaller than they are, which no healthy float16 run needs."""


@dataclasses.dataclass(frozen=True)
class Health:
    """What a log shows.

    Attributes:
        step: The step to look at: the first of what went wrong last, or the last skip; None for a log without skips.
        healthy: Whether every skip is of the harmless kind, and the loss of every applied step is finite.
        skips: How many steps were skipped.
        at_start: How many of them before the first step was applied.
        steps: How many steps there are.
        of_growth: How many of the skips followed a growth of the scale, and took it back to where it was.
        moved: How many steps were applied, and micro-batches of those.
        unseen: How many of them have a loss that is not finite.
        often: Where the other skips are too many, how many of how many steps of the second half; else None.
    """

    step: int | None
    healthy: bool
    skips: int
    at_start: int
    steps: int
    of_growth: int = 0
    moved: int = 0
    unseen: int = 0
    often: tuple[int, int] | None = None


def health(rows: Sequence[Mapping[str, Any]]) -> Health:
    """Judges a run by the rows of its log.

    Args:
        rows: In the order of the steps, with "step", "applied", "loss" and, of a `TrainStep`, "attempted" and "cause".
    """
    moved, unseen = _of_applied([row for row in rows if "applied" in row])
    attempts = [row for row in rows if row.get("attempted", True) and "applied" in row]
    streaks = _streaks(attempts)
    at_start = len(streaks[0]) if streaks and attempts[0] is streaks[0][0] else 0
    bad = [streak for streak in streaks if _is_bad(streak, attempts)]
    places = {row["step"]: place for place, row in enumerate(attempts)}
    of_growth = [streak for streak in streaks if _is_of_growth(streak, attempts, places[streak[0]["step"]])]
    grown = {row["step"] for streak in of_growth for row in streak}
    often = None if bad else _often(attempts[len(attempts) // 2 :], grown)
    if often:
        bad = [streak for streak in streaks if streak[0]["step"] not in grown][-1:]
    step = None
    if streaks:
        step = (_telling(bad[-1]) if bad else streaks[-1][-1])["step"]
    if unseen and not bad:
        step = unseen[-1]
    skips = sum(len(streak) for streak in streaks)
    healthy = not bad and not unseen
    return Health(step, healthy, skips, at_start, len(rows), len(grown), moved, len(unseen), often)


def _of_applied(rows: Sequence[Mapping]) -> tuple[int, list[int]]:
    """How many rows are of applied steps, and the numbers of those among them whose loss is not finite."""
    attempted = np.array([bool(row.get("attempted", True)) for row in rows], bool)
    moved = of_applied(attempted, np.array([bool(row["applied"]) for row in rows], bool))
    # A log has null for what JSON does not hold.
    unseen = [row["step"] for row, own in zip(rows, moved, strict=True) if own and row.get("loss", 0.0) is None]
    return int(moved.sum()), unseen


def _is_bad(streak: Sequence[Mapping], attempts: Sequence[Mapping]) -> bool:
    at_start, at_end = streak[0] is attempts[0], streak[-1] is attempts[-1]
    return (
        any(cause_name(row.get("cause")) not in _MEANT for row in streak)
        or (at_end and len(streak) >= _AT_END)
        or (not at_start and len(streak) >= _STREAK)
        or any((row.get("loss_scale") or _LOWEST) < _LOWEST for row in streak)
    )


def _is_of_growth(streak: Sequence[Mapping], attempts: Sequence[Mapping], first: int) -> bool:
    """Whether the scale had grown since the skips before, and is not lower after these than it was."""
    start, end = first, first + len(streak)
    while start and attempts[start - 1]["applied"]:
        start -= 1
    before, at = (attempts[place].get("loss_scale") for place in (start, first))
    if start == first or before is None or at is None or at <= before:
        return False
    after = before if end == len(attempts) else attempts[end].get("loss_scale")
    return after is not None and after >= before


def _often(attempts: Sequence[Mapping], grown: set[int]) -> tuple[int, int] | None:
    """How many of how many steps were skipped with no growth before, if these are too many."""
    skips = sum(not row["applied"] and row["step"] not in grown for row in attempts)
    return (skips, len(attempts)) if skips >= _LEAST and skips > SHARE * len(attempts) else None


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
    return next((row for row in streak if cause_name(row.get("cause")) not in _MEANT), streak[0])


def in_words(found: Health) -> str:
    """How many steps of a log were skipped, and what each skip is told to be."""
    if not found.skips:
        said = "the only step in the log was not skipped"
        return said if found.steps == 1 else f"none of the {found.steps} steps in the log was skipped"
    others = found.skips - found.at_start - found.of_growth
    kinds = [
        (found.at_start, "while the scale found its level"),
        (found.of_growth, "after it had grown, which took it back"),
        (others, "beside, where gradients grew"),
    ]
    parts = [f"{count} {kind}" for count, kind in kinds if count]
    steps = "the only step" if found.steps == 1 else f"{found.skips} of the {found.steps} steps"
    return f"{steps} in the log {agreeing(found.skips, 'was', 'were')} skipped: {', '.join(parts)}"


def what_is_wrong(found: Health) -> str:
    """What the log of a run that is not healthy shows as a whole; empty where only single skips are wrong."""
    return " ".join(part for part in (too_often(found), unseen_losses(found)) if part)


def unseen_losses(found: Health) -> str:
    """How many applied steps have a loss that is not finite, as a sentence; empty where none has."""
    if not found.unseen:
        return ""
    steps = f"{found.unseen:,} of the {found.moved:,} applied steps" if found.moved > 1 else "The only applied step"
    return f"{steps} in the log {agreeing(found.unseen, 'has', 'have')} a loss that is not finite."


def too_often(found: Health) -> str:
    """Which share of a log is too large, as a sentence; empty where none is."""
    if found.often is None:
        return ""
    skips, steps = found.often
    return (
        f"In the second half of the log {skips} of {steps} steps ({skips / steps:.0%}) were skipped without a growth "
        f"of the scale before; up to {SHARE:.0%} is normal."
    )
