"""Judges the skips in a run's log: whether they are harmless, and which step to look at. Pure functions.

A scale that begins too high is halved until it fits: these skips find its level. Afterwards it grows after every
growth interval, and is halved again if the larger scale overflows: one skip per interval, however short the interval
is. Both are intended. Growth cannot be seen where one column holds several scales. A run may occasionally skip for
other reasons, when its gradients grow.

A log with some of a run's steps leaves open what it does not show. A trace may be part of the log.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from loops.loop.silence import ZEROS, in_a_row, of_applied
from loops.record.steps import Counted, Steps
from loops.support.part_names import part_names
from loops.support.text import agreeing, amount

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


def health(steps: Steps, counted: Counted | None = None, *, traced: bool = False) -> Health:
    """Judges a run by its steps.

    Args:
        steps: The columns "applied", "attempted", "loss", "loss_scale" and "grad_norm", and the causes.
        counted: What the run counted itself, for a log without some of its steps.
        traced: Whether steps of a trace are among them.
    """
    # Of a micro-batch it is known that no decision was taken.
    known = (steps.known | ~steps.attempted) & ("applied" in steps.columns)
    moved = of_applied(steps.attempted[known], steps.column("applied")[known] != 0)
    lost = ~np.isfinite(steps.column("loss")[known]) & ("loss" in steps.columns)
    unseen = steps.step[known][moved & lost].tolist()
    decided = steps.where(known & steps.attempted)
    attempts = _of_skipped_parts(decided)
    streaks = _streaks(attempts)
    bad = [one for one in streaks if one.is_bad]
    of_growth = {step for one in streaks if one.is_of_growth for step in one.steps}
    untold = {step for one in streaks if not one.is_bad and one.is_untold for step in one.steps}
    often = None if bad else _often(attempts.where(slice(len(attempts) // 2, None)), of_growth | untold)
    if often:
        bad = [one for one in streaks if one.steps[0] not in of_growth | untold][-1:]
    step = streaks[-1].steps[-1] if streaks else None
    later: tuple[int, ...] = ()
    if bad:
        step, *others = bad[-1].telling
        later = tuple(others or (one for one in bad[-1].steps if one > step))
    if unseen and not bad:
        step = unseen[-1]
    zeros, since = _zeros(decided)
    if zeros and not unseen and (not bad or bad[-1].steps[-1] < since):
        step, later = since, ()
    skipped = [step for one in streaks for step in one.steps]
    # A step may be logged without its decision: then it says as little of skips as one that was not logged.
    said = (steps.step[known] if known.any() else steps.step).tolist()
    return Health(
        step=step,
        healthy=not bad and not unseen and not zeros,
        skips=len(skipped),
        at_start=len(streaks[0].steps) if streaks and streaks[0].first == 0 else 0,
        steps=len(steps),
        of_growth=len(of_growth),
        untold=len(untold),
        moved=int(moved.sum()),
        unseen=len(unseen),
        zeros=zeros,
        later=later,
        often=often,
        last=int(steps.step[-1]) if len(steps) else 0,
        spikes=sum(cause == _SPIKE for one in streaks for cause in one.causes),
        thinned=thinned(said, skipped, counted, traced=traced, silent=len(said) < len(steps)),
    )


def _of_skipped_parts(steps: Steps) -> Steps:
    """The steps in which it is the turn of a part that is ever skipped; all of a step without parts.

    Where it is not its turn, a part with `every=2` is neither skipped nor applied, and its streak goes on.
    """
    parts = part_names(steps.columns)
    due = [steps.column(f"{part}/attempted") != 0 for part in parts]
    skipped = [
        own for part, own in zip(parts, due, strict=True) if (own & (steps.column(f"{part}/applied") == 0)).any()
    ]
    return steps.where(np.logical_or.reduce(skipped)) if skipped else steps


@dataclasses.dataclass(frozen=True)
class _Streak:
    """Consecutive skips among the attempts of a run.

    Attributes:
        attempts: The attempts.
        first: The place of the first of these skips.
        end: The place after the last.
        since: The place after the skips before.
    """

    attempts: Steps
    first: int
    end: int
    since: int

    @functools.cached_property
    def steps(self) -> list[int]:
        """The skipped steps."""
        return self.attempts.step[self.first : self.end].tolist()

    @functools.cached_property
    def causes(self) -> list[str]:
        """Why each was skipped."""
        return self.attempts.cause[self.first : self.end].tolist()

    @property
    def is_bad(self) -> bool:
        scale, count = self.attempts.column("loss_scale")[self.first : self.end], len(self.steps)
        return (
            not set(self.causes) <= {*_MEANT}
            or (self.end == len(self.attempts) and count >= _AT_END)
            or (self.first > 0 and count >= _STREAK)
            or bool(((scale < _LOWEST) & (scale != 0)).any())
        )

    @property
    def is_of_growth(self) -> bool:
        """Whether the scale had grown since the previous skips, and these skips only undid that."""
        scale = self.attempts.column("loss_scale")
        if _SPIKE in self.causes or self.since == self.first or not scale[self.first] > scale[self.since]:
            return False
        after = self.since if self.end == len(scale) else self.end
        return bool(scale[after] >= scale[self.since])

    @property
    def is_untold(self) -> bool:
        """Whether the scale of these skips was below that of the applied steps around them: that of another scaler.

        One scale alone does not rise over a skip.
        """
        if self.first == 0 or _SPIKE in self.causes:
            return False
        scale = self.attempts.column("loss_scale")
        around = scale[[place for place in (self.first - 1, self.end) if place < len(scale)]]
        return bool(scale[self.first : self.end].max() < around.min())

    @property
    def telling(self) -> list[int]:
        """The skips that a high scale does not explain, or all of them: the first is closest to the cause."""
        return [step for step, cause in zip(self.steps, self.causes, strict=True) if cause not in _MEANT] or self.steps


def _streaks(attempts: Steps) -> list[_Streak]:
    edges = np.flatnonzero(np.diff(attempts.column("applied") == 0, prepend=False, append=False)).tolist()
    firsts, ends = edges[::2], edges[1::2]
    return [_Streak(attempts, *places) for places in zip(firsts, ends, [0, *ends][: len(ends)], strict=True)]


def _often(attempts: Steps, grown: set[int]) -> tuple[int, int] | None:
    """The number of skips without a preceding growth and that of all steps, if these skips are too many."""
    skips = len(set(attempts.step[attempts.skipped].tolist()) - grown)
    return (skips, len(attempts)) if skips >= _LEAST and skips > SHARE * len(attempts) else None


def _zeros(attempts: Steps) -> tuple[int, int]:
    """The number of applied steps at the end with zero gradients, and the first of them; 0 and 0 if they are few."""
    applied = attempts.where(~attempts.skipped)
    count = in_a_row(np.full(len(applied), True), applied.column("grad_norm"), applied.column("loss"))
    return (count, int(applied.step[-count])) if count >= ZEROS else (0, 0)


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
        (found.spikes, agreeing(found.spikes, "as a spike, far beyond", "as spikes, far beyond") + " the steps before"),
        (
            found.untold,
            "at a loss scale below that of the applied steps around, as by one of several losses: the log does not "
            "tell whether that scale had grown",
        ),
        (others, "as gradients grew" if others == found.skips else "for other reasons, as gradients grew"),
    ]
    seen = [(count, kind) for count, kind in kinds if count]
    why = f" {seen[0][1]}" if len(seen) == 1 else f": {', '.join(f'{count} {kind}' for count, kind in seen)}"
    steps = "the only step" if found.steps == 1 else f"{found.skips} of the {found.steps} steps"
    return f"{steps} in the log {agreeing(found.skips, 'was', 'were')} skipped{why}"


def what_is_wrong(found: Health) -> str:
    """What is wrong with a run as a whole; empty if only individual skips are."""
    said = [too_often(found)]
    if found.unseen:
        steps = f"{found.unseen:,} of the {found.moved:,} applied steps" if found.moved > 1 else "The only applied step"
        said.append(f"{steps} in the log {agreeing(found.unseen, 'has', 'have')} a loss that is not finite.")
    if found.zeros:
        said.append(
            f"The gradients of the last {found.zeros:,} applied steps in the log have a norm of exactly zero, although "
            "their loss is not zero."
        )
    return " ".join(part for part in (*said, not_logged(found)) if part)


def not_logged(found: Health) -> str:
    """What a log without some of the steps leaves open, as sentences; empty for a log of all steps."""
    return said_of(found.thinned) if found.thinned else ""


def too_often(found: Health) -> str:
    """A sentence about a share of skips that is too large; empty if it is not."""
    if found.often is None:
        return ""
    skips, steps = found.often
    return (
        f"In the second half of the log {skips} of {steps} steps ({skips / steps:.0%}) were skipped without a growth "
        f"of the scale before; up to {SHARE:.0%} is normal."
    )


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
