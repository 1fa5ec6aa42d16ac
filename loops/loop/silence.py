"""What would stay silent in a run, said once: stuck scalers, no decisions, few applied steps, losses nobody sees."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.loop.results import CallResult, Counters
from loops.loop.visit import Visit
from loops.step.user_steps import Found
from loops.support.part_names import of_part, part_names


class Checks:
    """Looks at the loss scalers, losses and gradients of a run at its visits.

    Args:
        train_step: The user's own.
    """

    def __init__(self, train_step: Any):
        self._own = getattr(train_step, "loss_scaler", None)
        # A step of one's own may keep anything as `scalers`.
        by_part = getattr(train_step, "scalers", None)
        self._by_part = by_part if isinstance(by_part, Mapping) else {}
        self._contradicted = False
        self._looks: dict[str, tuple[UnseenLosses, ZeroGradients]] = {}

    def check(self, visit: Visit, call: CallResult, why_skipped: Callable[[], str | None]) -> None:
        """Warns of a non-finite loss, zero gradients, and contradicting outputs.

        Args:
            visit: The visit.
            call: What it is about.
            why_skipped: Returns what the actions say of the last skip; called only for an error.

        Raises:
            scaler.StuckError: If a loss scaler is stuck.
        """
        if call.contradiction and not self._contradicted:
            self._contradicted = True
            warnings.warn(call.contradiction, UserWarning, stacklevel=3)
        scalers = [one for one, _ in call.readings]
        # With several scalers it is unknown whose loss it is, unless the step has parts with names.
        only = scalers[0] if len(scalers) == 1 else None
        self._look(visit, "", only)
        for part in part_names(visit.outputs):  # A step of one's own may give its outputs such names.
            one, outputs = self._by_part.get(part, only), of_part(visit.outputs, part)
            known = one if isinstance(one, scaler.LossScaler) else None
            self._look(dataclasses.replace(visit, outputs=outputs), part, known)
        checked = None
        try:
            for checked, reading in call.readings:
                checked.check(reading)
            if self._own is not None and self._own not in scalers:
                checked = self._own
                checked.check()
        except scaler.StuckError as error:
            parts = [name for name, one in self._by_part.items() if one is checked] if len(self._by_part) > 1 else []
            of = f"Part {parts[0]!r}:" if len(parts) == 1 else None
            raise scaler.StuckError(" ".join(filter(None, [of, str(error), why_skipped()]))) from None

    def _look(self, visit: Visit, part: str, loss_scaler: scaler.LossScaler | None) -> None:
        """Warns of applied steps without a gradient, and of a loss that cannot be seen: of a part, or of the step."""
        of = f" of part {part!r}" if part else ""
        unseen_losses, zero_gradients = self._looks.setdefault(part, (UnseenLosses(bool(part)), ZeroGradients(of)))
        if zero := zero_gradients.sentence(visit):
            warnings.warn(zero, scaler.ScaleWarning, stacklevel=4)
        unseen = unseen_losses.first(visit)
        # A step that contradicted its scaler may be wrong again.
        if unseen is not None and loss_scaler is not None and not self._contradicted:
            scaler.authoring.warn_of_unseen_loss(loss_scaler, f"Step {unseen:,}{of}")


UNDECIDED, AT_END = 1000, 100
"""So many undecided steps are worth a word, in a run and at its end, where fewer may be an incomplete window."""

BAD, SKIPPED, SHORT, SHARE = 5, 20, 50, 0.7
"""A run of 20 attempted steps without an applied one is reported, of 5 if their loss was not finite, which no scale
helps, and one of 50 that skipped more than this share.
"""


def warn_if_most_were_skipped(before: Counters, now: Counters, scalers: Collection[scaler.LossScaler]) -> None:
    """Warns at the end of a run that applied few of its steps or none, and was too short to be stopped as stuck.

    Args:
        before: Where the run began.
        now: Where it ended.
        scalers: The loss scalers of its steps.
    """
    steps, applied = now.attempted - before.attempted, now.applied - before.applied
    hopeless = not applied and steps >= BAD and any(map(_has_no_loss, scalers))
    few = hopeless or (steps >= SKIPPED and not applied) or (steps >= SHORT and steps - applied > SHARE * steps)
    if few and now.known:
        said = f"only {applied:,} of its {steps:,}" if applied else f"none of its {steps:,}"
        why = " ".join(one.explain() for one in scalers)
        warnings.warn(
            f"The run ends, and {said} attempted steps {'were' if applied > 1 else 'was'} applied. {why}".rstrip(),
            scaler.StuckWarning,
            stacklevel=4,
        )


def _has_no_loss(one: scaler.LossScaler) -> bool:
    """Whether a scaler skipped its last steps, and the last of them because its loss was not finite."""
    return int(one.counters.consecutive_skips) >= BAD and int(one.last_skip.cause) == scaler.Cause.LOSS


class Undecided:
    """Compares the attempts that each loss scaler counts with the steps of the run."""

    def __init__(self) -> None:
        self._since: dict[scaler.LossScaler, tuple[int, int, int]] = {}

    def watch(self, found: Found, data: tf.Variable) -> None:
        """Begins to count for the loss scalers of a step, when it is traced: after a restore, before the first step.

        Args:
            found: What its graph has.
            data: How many steps were taken.
        """
        for one in set(found.concerned).difference(self._since):
            with tf.init_scope():
                self._since[one] = int(one.counters.attempted), int(data), AT_END if one in found.scalers else 1

    def look(self, steps: int, ended: bool) -> None:
        """Lets each of them warn that decided nothing for long, or in the whole run; at a visit of the host.

        Args:
            steps: How many were taken.
            ended: Whether the run ends here.
        """
        for one, (attempted, since, few) in self._since.items():
            if steps - since >= (few if ended else UNDECIDED):
                now = int(one.counters.attempted)
                if now == attempted:
                    scaler.authoring.warn_of_no_decision(one, steps - since)
                self._since[one] = now, steps, few


def of_applied(attempted: np.ndarray, applied: np.ndarray) -> np.ndarray:
    """Which batches moved the weights: those of applied steps, including every micro-batch of an applied window.

    Args:
        attempted: Bool [steps], whether a decision was taken.
        applied: Bool [steps].

    Returns:
        Bool [steps], False for batches of a window that these steps do not finish.
    """
    (decided,) = np.nonzero(attempted)
    following = np.searchsorted(decided, np.arange(len(attempted)))
    known = following < len(decided)
    found = np.zeros(len(attempted), bool)
    found[known] = applied[decided[following[known]]]
    return found


class UnseenLosses:
    """Finds the first step of a run that was applied although the loss that it returned is not finite.

    Args:
        takes_turns: Whether a loss of NaN means that nothing was computed, where no step was attempted.
    """

    def __init__(self, takes_turns: bool = False) -> None:
        self._takes_turns = takes_turns
        self._before = Counters()
        # The first step with a non-finite loss in the window that is still open after the last visit.
        self._waiting: int | None = None

    def first(self, visit: Visit) -> int | None:
        """The number of that step, or None if this visit has none."""
        loss = visit.outputs.get("loss")
        before, self._before = self._before, visit.counters
        if loss is None:
            return None
        if np.isfinite(loss).all() and self._waiting is None:
            return None
        attempted, applied = _decisions(visit, before)
        left_out = np.isnan(loss) & ~attempted if self._takes_turns else np.zeros(len(loss), bool)
        lost = [visit.first + int(row) for row in np.flatnonzero(~np.isfinite(loss) & ~left_out)]
        decided = np.flatnonzero(attempted)
        waiting = self._waiting
        if len(decided):
            self._waiting = None
            if waiting is not None and applied[decided[0]]:
                return waiting
        moved = of_applied(attempted, applied)
        ends = visit.first + (int(decided[-1]) if len(decided) else -1)
        self._waiting = self._waiting or next((step for step in lost if step > ends), None)
        return next((step for step in lost if moved[step - visit.first]), None)


def _decisions(visit: Visit, before: Counters) -> tuple[np.ndarray, np.ndarray]:
    """Which steps of a visit were attempted, and which applied; none of them applied if that is unknown."""
    steps = len(next(iter(visit.outputs.values())))
    attempted = visit.outputs.get("attempted", np.ones(steps, bool)).astype(bool)
    if "applied" in visit.outputs:
        return attempted, visit.outputs["applied"].astype(bool)
    now = visit.counters
    whole = now.known and now.skipped == before.skipped and now.attempted - before.attempted == steps
    return attempted, np.full(steps, whole and before.data == visit.first - 1)


ZEROS = 20
"""So many applied steps in a row are worth a word. A few may be a saturated batch."""


class ZeroGradients:
    """Counts such steps, and says so once.

    Args:
        of: Whose steps they are, as the end of "steps"; "" for those of the run.
    """

    def __init__(self, of: str = "") -> None:
        self._of = of
        self._row = 0
        self._said = False

    def sentence(self, visit: Visit) -> str | None:
        """A warning, the first time that the last twenty applied steps are all such; else None.

        Args:
            visit: Its step returns `applied`, `grad_norm` and `loss`; of others nothing is known.
        """
        outputs = visit.outputs
        if self._said or not {"applied", "grad_norm", "loss"} <= set(outputs):
            return None
        self._row = in_a_row(outputs["applied"], outputs["grad_norm"], outputs["loss"], self._row)
        if self._row < ZEROS:
            return None
        self._said = True
        return (
            f"Step {visit.counters.data:,}: the gradients of the last {self._row:,} applied steps{self._of} had a norm "
            "of exactly zero, though their loss is not zero. The usual reason is that 16 bits flush small gradients to "
            "zero: use a larger loss scale. If that does not help, the loss does not depend on the weights here, for "
            "example because it is clipped. `halfstep explain` tries larger scales."
        )


def in_a_row(applied: np.ndarray, grad_norm: np.ndarray, loss: np.ndarray, before: int = 0) -> int:
    """How many of the last applied steps have a gradient norm of exactly 0 and a finite loss that is not.

    Args:
        applied: Bool [steps]. Other steps do not count, and do not end the row.
        grad_norm: [steps].
        loss: [steps].
        before: How many there were just before these steps.
    """
    if not len(applied):
        return before
    applied = np.asarray(applied, bool)
    zero = ((grad_norm == 0) & np.isfinite(loss) & (loss != 0))[applied]
    (others,) = np.nonzero(~zero)
    return len(zero) - 1 - int(others[-1]) if len(others) else before + len(zero)
