"""Judges the skips in a run's log: whether they are harmless, and which step to look at. Pure functions.

A scale that begins too high is halved until it fits: these skips find its level. Afterwards it grows after every
growth interval, and is halved again if the larger scale overflows: one skip per interval, however short the interval
is. Both are intended. Growth cannot be seen where one column holds several scales. A run may occasionally skip for
other reasons, when its gradients grow.


What a skipped step was skipped for, in words: from the numbers that a step returns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loops.loop.silence import ZEROS, in_a_row, of_applied
from loops.loop.visit import Visit
from loops.record.columns import cause_name, cause_names
from loops.record.thinned import Counted, Thinned, said_of, thinned
from loops.step.parts import OwnStep
from loops.support.part_names import part_names
from loops.support.text import agreeing

_SPIKE = "SPIKE"
_MEANT = ("", "OVERFLOW", _SPIKE)
_STREAK = 5
"""So many consecutive skips after the first applied step are wrong: gradients would have had to grow 32-fold."""
_AT_END = 3
"""So many consecutive skips at the end of a run are wrong."""
SHARE = 0.05
"""The largest normal share of steps in the second half that were skipped without a preceding growth of the scale."""
_LEAST = 3
"""Fewer skips than this are never too large a share."""
_LOWEST = 1.0
"""A loss scale below this makes gradients smaller than they are, which a healthy float16 run does not need."""


@dataclasses.dataclass(frozen=True)
class Health:
    """The skips and the losses in a log.

    Attributes:
        step: The step to look at: where the last problem began, or the last skip; None for a log without skips.
        healthy: Whether every skip is harmless, the loss of every applied step is finite, and the last gradients are
            not zero.
        skips: The number of skipped steps.
        at_start: How many of them came before the first applied step.
        steps: The number of steps.
        of_growth: How many of the skips followed a growth of the scale, and undid it.
        untold: How many of the skips had a lower scale than the applied steps around them. A step of a `PerLoss` logs
            its largest scale, and after a skip that of the loss which caused it: whether that one had grown, its log
            does not tell.
        moved: The number of applied steps, including their micro-batches.
        unseen: How many of them have a loss that is not finite.
        zeros: How many of the last applied steps have a gradient norm of exactly 0 and a loss that is not; 0 if they
            are few.
        later: The skips after `step` without an applied step between, only those that a high scale does not explain if
            there are any of these.
        often: If the other skips are too many: their number and that of all steps, in the second half; else None.
        last: The last step.
        spikes: How many of the skips a `scaler.SpikeGuard` made.
        thinned: What a log without some of the steps leaves open; None for a log of all steps.
    """

    step: int | None
    healthy: bool
    skips: int
    at_start: int
    steps: int
    of_growth: int = 0
    untold: int = 0
    moved: int = 0
    unseen: int = 0
    zeros: int = 0
    later: tuple[int, ...] = ()
    often: tuple[int, int] | None = None
    last: int = 0
    spikes: int = 0
    thinned: Thinned | None = None

    @property
    def open(self) -> bool:
        """Whether there are, or may be, skips that the log does not show."""
        return self.thinned is not None and self.thinned.open

    @property
    def sure(self) -> bool:
        """Whether the log shows all skips, and tells of which kind they are."""
        return not self.open and not self.untold


def health(rows: Sequence[Mapping[str, Any]], counted: Counted | None = None, *, traced: bool = False) -> Health:
    """Judges a run by the rows of its log.

    Args:
        rows: The rows in the order of the steps, with "step", "applied", "loss" and, for a `TrainStep`, "attempted",
            "grad_norm" and "cause".
        counted: What the run counted itself, for a log without some of its steps.
        traced: Whether rows of a trace are among them.
    """
    moved, unseen = _of_applied([row for row in rows if "applied" in row])
    decided = [row for row in rows if row.get("attempted", True) and "applied" in row]
    attempts = _of_skipped_parts(decided)
    streaks = _streaks(attempts)
    at_start = len(streaks[0]) if streaks and attempts[0] is streaks[0][0] else 0
    bad = [streak for streak in streaks if _is_bad(streak, attempts)]
    places = {row["step"]: place for place, row in enumerate(attempts)}
    of_growth = [streak for streak in streaks if _is_of_growth(streak, attempts, places[streak[0]["step"]])]
    grown = {row["step"] for streak in of_growth for row in streak}
    untold = {
        row["step"]
        for streak in streaks
        if streak not in bad and _is_untold(streak, attempts, places[streak[0]["step"]])
        for row in streak
    }
    often = None if bad else _often(attempts[len(attempts) // 2 :], grown | untold)
    if often:
        bad = [streak for streak in streaks if streak[0]["step"] not in grown | untold][-1:]
    step = None
    if streaks:
        step = (_telling(bad[-1]) if bad else streaks[-1][-1])["step"]
    later = _later(bad[-1], step) if bad else ()
    if unseen and not bad:
        step = unseen[-1]
    zeros, since = _zeros(decided)
    if zeros and not unseen and (not bad or bad[-1][-1]["step"] < since):
        step, later = since, ()
    healthy = not bad and not unseen and not zeros
    skipped = [row["step"] for streak in streaks for row in streak]
    # A step may be logged without its decision: then it says as little of skips as one that was not logged.
    known = [row["step"] for row in rows if "applied" in row] or [row["step"] for row in rows]
    return Health(
        step=step,
        healthy=healthy,
        skips=len(skipped),
        at_start=at_start,
        steps=len(rows),
        of_growth=len(grown),
        untold=len(untold),
        moved=moved,
        unseen=len(unseen),
        zeros=zeros,
        later=later,
        often=often,
        last=rows[-1]["step"] if rows else 0,
        spikes=sum(_is_spike(row) for streak in streaks for row in streak),
        thinned=thinned(known, skipped, counted, traced=traced, silent=len(known) < len(rows)),
    )


def _of_skipped_parts(rows: Sequence[Mapping]) -> Sequence[Mapping]:
    """The rows in which it is the turn of a part that is ever skipped; all rows of a step without parts.

    Where it is not its turn, a part with `every=2` is neither skipped nor applied, and its streak goes on.
    """
    parts = part_names(dict.fromkeys(name for row in (*rows[:1], *rows[-1:]) for name in row))
    due = {part: [bool(row.get(f"{part}/attempted", True)) for row in rows] for part in parts}
    skipped = [
        part
        for part in parts
        if any(own and row.get(f"{part}/applied") is False for own, row in zip(due[part], rows, strict=True))
    ]
    if not skipped:
        return rows
    return [row for place, row in enumerate(rows) if any(due[part][place] for part in skipped)]


def _of_applied(rows: Sequence[Mapping]) -> tuple[int, list[int]]:
    """The number of applied steps with their micro-batches, and those of them whose loss is not finite."""
    attempted = np.array([bool(row.get("attempted", True)) for row in rows], bool)
    moved = of_applied(attempted, np.array([bool(row["applied"]) for row in rows], bool))
    # A log has null for NaN and infinities.
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
    """Whether the scale had grown since the previous skips, and these skips only undid that."""
    if any(map(_is_spike, streak)):
        return False
    start, end = first, first + len(streak)
    while start and attempts[start - 1]["applied"]:
        start -= 1
    before, at = (attempts[place].get("loss_scale") for place in (start, first))
    if start == first or before is None or at is None or at <= before:
        return False
    after = before if end == len(attempts) else attempts[end].get("loss_scale")
    return after is not None and after >= before


def _is_untold(streak: Sequence[Mapping], attempts: Sequence[Mapping], first: int) -> bool:
    """Whether the scale of these skips was below that of the applied steps around them: that of another scaler.

    One scale alone does not rise over a skip.
    """
    if first == 0 or any(map(_is_spike, streak)):
        return False
    around = [attempts[place] for place in (first - 1, first + len(streak)) if place < len(attempts)]
    rows = [*streak, *around]
    scales = [float(row["loss_scale"]) for row in rows if row.get("loss_scale") is not None]
    return len(scales) == len(rows) and max(scales[: len(streak)]) < min(scales[len(streak) :])


def _is_spike(row: Mapping) -> bool:
    return cause_name(row.get("cause")) == _SPIKE


def _often(attempts: Sequence[Mapping], grown: set[int]) -> tuple[int, int] | None:
    """The number of skips without a preceding growth and that of all steps, if these skips are too many."""
    skips = sum(not row["applied"] and row["step"] not in grown for row in attempts)
    return (skips, len(attempts)) if skips >= _LEAST and skips > SHARE * len(attempts) else None


def _streaks(attempts: Sequence[Mapping]) -> list[list[Mapping]]:
    """Groups consecutive skips."""
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
    """The first skip that a high scale does not explain, or else the first: it is closest to the cause."""
    return next((row for row in streak if cause_name(row.get("cause")) not in _MEANT), streak[0])


def _zeros(attempts: Sequence[Mapping]) -> tuple[int, int]:
    """The number of applied steps at the end with zero gradients, and the first of them; 0 and 0 if they are few."""
    applied = [row for row in attempts if row["applied"]]
    norms, losses = (
        np.array([math.nan if row.get(name) is None else row[name] for row in applied])
        for name in ("grad_norm", "loss")
    )
    count = in_a_row(np.ones(len(applied), bool), norms, losses)
    return (count, applied[-count]["step"]) if count >= ZEROS else (0, 0)


def _later(streak: Sequence[Mapping], step: int | None) -> tuple[int, ...]:
    rest = [row for row in streak if step is not None and row["step"] > step]
    strange = [row for row in rest if cause_name(row.get("cause")) not in _MEANT]
    return tuple(row["step"] for row in strange or rest)


def in_words(found: Health) -> str:
    """How many steps of a log were skipped, and of which kind."""
    if not found.skips:
        if found.steps == 1:
            return "the only step in the log was not skipped"
        return f"none of the {found.steps} steps in the log was skipped"
    others = found.skips - found.at_start - found.of_growth - found.untold - found.spikes
    kinds = [
        (found.at_start, "while the scale found its level"),
        (found.of_growth, "after it had grown, which took it back"),
        (found.spikes, "as spikes, far beyond the steps before them"),
        (
            found.untold,
            "at a loss scale below that of the applied steps around, as by one of several losses: the log does not "
            "tell whether that scale had grown",
        ),
        (others, "for other reasons, as gradients grew"),
    ]
    parts = [f"{count} {kind}" for count, kind in kinds if count]
    steps = "the only step" if found.steps == 1 else f"{found.skips} of the {found.steps} steps"
    return f"{steps} in the log {agreeing(found.skips, 'was', 'were')} skipped: {', '.join(parts)}"


def what_is_wrong(found: Health) -> str:
    """What is wrong with a run as a whole; empty if only individual skips are."""
    parts = (too_often(found), unseen_losses(found), zero_gradients(found), not_logged(found))
    return " ".join(part for part in parts if part)


def not_logged(found: Health) -> str:
    """What a log without some of the steps leaves open, as sentences; empty for a log of all steps."""
    return said_of(found.thinned) if found.thinned else ""


def unseen_losses(found: Health) -> str:
    """How many applied steps have a loss that is not finite, as a sentence; empty if none has."""
    if not found.unseen:
        return ""
    steps = f"{found.unseen:,} of the {found.moved:,} applied steps" if found.moved > 1 else "The only applied step"
    return f"{steps} in the log {agreeing(found.unseen, 'has', 'have')} a loss that is not finite."


def zero_gradients(found: Health) -> str:
    """How many of the last applied steps have zero gradients, as a sentence; empty if they are few."""
    if not found.zeros:
        return ""
    return (
        f"The gradients of the last {found.zeros:,} applied steps in the log have a norm of exactly zero, although "
        "their loss is not zero."
    )


def too_often(found: Health) -> str:
    """A sentence about a share of skips that is too large; empty if it is not."""
    if found.often is None:
        return ""
    skips, steps = found.often
    return (
        f"In the second half of the log {skips} of {steps} steps ({skips / steps:.0%}) were skipped without a growth "
        f"of the scale before; up to {SHARE:.0%} is normal."
    )


def skip_names(visit: Visit, train_step: Any) -> dict[str, list[str | None]]:
    """The columns `cause` and `variable` of a visit as texts, None at each step that was not skipped.

    Args:
        visit: The steps.
        train_step: The loop's. The variables of a `TrainStep` and of a `ComposedStep` are known, there with the name of
            the part; of another step there is no column.
    """
    if not isinstance(train_step, OwnStep):
        return {}
    paths = train_step.names_of_weights()
    variables = [paths[value] if value >= 0 else None for value in visit.outputs["variable"].tolist()]
    return {"cause": cause_names(visit.outputs["cause"]), "variable": variables}
