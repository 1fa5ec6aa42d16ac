"""Tries the remedies of a failed step, weighs what each gives, and says what is to blame.

A remedy is worth what it leaves of the gradients, and the loss that it gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts, loss_name
from loops.diagnose.explain.case import Case
from loops.diagnose.explain.examples import example_of
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import IN_PLACE, SINCE_THE_CHECKPOINT, Kind, Remedy, Row
from loops.diagnose.graph.changes import with_value
from loops.step.train_step import TrainStep
from loops.support.text import amount

_FAR = 10.0
"""An update of so many times the norm of the weights leaves nothing of what they were."""
_SURE = (Kind.OWN_VARIABLES_CLEARED, Kind.WEIGHT_DECAY)
"""A remedy of these kinds that helps also shows the cause."""
_GROWN = 100.0
"""If the loss exceeds the smallest loss before it by this factor, training has diverged."""
_LEAST = 0.1
"""With a smaller share of its gradients a step hardly trains."""
_ABSURD = 1e4
"""If the loss exceeds the usual loss by this factor, the step does not train usefully."""
Counts = Mapping[str, np.ndarray]
"""The number of non-zero values of each gradient, by the name of the remedy."""
Trial = Callable[[Remedy, contextlib.AbstractContextManager[Any]], Remedy]


def in_order(known: Explanation, case: Case, rows: Iterable[Row]) -> list[Remedy]:
    """Tries remedies, and returns them: those that help first, and among them the smallest change first.

    Args:
        known: What is known about the step so far.
        case: The step.
        rows: The remedies to try; if empty, only the loss scale that fits is tried.
    """
    attempts, counts = case.attempts, {}

    def at_the_step(remedy: Remedy, change: contextlib.AbstractContextManager[Any]) -> Remedy:
        other = remedy.kind is Kind.ANOTHER_BATCH
        attempt = attempts.take(None, attempts.moment.next_batch) if other else attempts.take(change)
        if attempt.nonzero is not None:
            counts[remedy.name] = attempt.nonzero
        far = attempt.finite and attempt.moved is not None and attempt.moved > _FAR
        why = f"its update is {attempt.moved:.2g} times as large as the weights" if far else None
        return dataclasses.replace(
            remedy, tried=True, finite=attempt.finite, loss=attempt.loss, at_scale=attempt.at_scale, why_not=why
        )

    tried = found = _tried(case, rows, at_the_step)
    for scale in (known.fits_at, known.flushed_at):
        if scale is not None:
            lower, left = _lower_scale(known, attempts, scale)
            counts |= {} if left is None else {lower.name: left}
            # A scale below 1 makes gradients smaller than they are, which does not cure anything.
            found = [lower, *found] if scale >= 1.0 else [*found, lower]
    applied = losses_of_applied(attempts.moment, attempts.part)

    def weigh(remedies: list[Remedy]) -> list[Remedy]:
        return weighed(remedies, counts, lambda: attempts.take_at(attempts.scanned_at or 1.0).nonzero, applied)

    if tried and not known.lost_weight and _may_have_diverged(known, attempts, weigh(found)):
        found = [*try_since_checkpoint(attempts, applied), *found]

    def place(remedy: Remedy) -> tuple:
        far = remedy.loss_ratio is not None and remedy.loss_ratio > _GROWN
        hides = remedy.kind is Kind.DERIVATIVES_ZEROED
        return not remedy.helps, not remedy.finite, far, hides, remedy.kind not in _SURE

    return sorted(weigh(found), key=place)


def _tried(case: Case, rows: Iterable[Row], trial: Trial, since: str = "") -> list[Remedy]:
    """Tries each remedy that applies, as long as there is time; of the lower rates none after the first that helps."""
    remedies: list[Remedy] = []
    found = False
    for row in rows:
        for words in row.each(case):
            is_rate = row.kind is Kind.LEARNING_RATE and bool(words)
            change = row.change(case, **words)
            if not change or (is_rate and found):
                continue
            name, advice = (text.format(it=case, **words) for text in (row.name, row.advice))
            remedy = Remedy(row.kind, f"{name}{since}", False, False, math.nan, advice, layer=row.layer(case))
            remedy = dataclasses.replace(remedy, since_checkpoint=bool(since))
            if case.attempts.in_time():
                # A layer may not run in another dtype, or the next batch may have another shape.
                with contextlib.suppress(TypeError, ValueError, tf.errors.OpError, scaler.ScalerError):
                    remedy = trial(remedy, change)
            remedies.append(remedy)
            if is_rate:
                found = (remedy.finite and remedy.why_not is None) or (bool(since) and not remedy.tried)
    return remedies


def try_since_checkpoint(attempts: Attempts, losses: Sequence[float] = ()) -> list[Remedy]:
    """Replays the steps since the checkpoint with each remedy; empty if there are none.

    Args:
        attempts: The attempts at the step.
        losses: The losses of the earlier applied steps. A rate with which the loss is absurd beside them does not help.
    """
    moment, step = attempts.moment, attempts.moment.train_step
    back = moment.step - 1 - moment.began_at

    def replayed(remedy: Remedy, change: contextlib.AbstractContextManager[Any]) -> Remedy:
        def changed(loop: Any) -> Callable:
            del loop
            with contextlib.ExitStack() as stack:
                stack.enter_context(change)
                return stack.pop_all().close

        # Replaying traces a `ComposedStep` again in any case, so that each step has its own turns.
        with step.retraced() if isinstance(step, TrainStep) else contextlib.nullcontext():
            last = moment.from_checkpoint(changed)[-1]
        name = loss_name(attempts.part)
        loss = float(last.get(name, math.nan))
        applied = (math.isfinite(loss) or name not in last) and bool(last.get("applied", "loss" in last))
        why = absurd_loss(loss, losses) if applied else None
        return dataclasses.replace(remedy, tried=True, finite=applied, loss=loss, why_not=why)

    # A `tf.function` of the user would go on with its first trace, and nothing would be changed.
    with with_value(moment, "take", attempts.take_inlined):
        since = f" for the last {amount(back, 'step')}"
        return _tried(Case(attempts), SINCE_THE_CHECKPOINT if back else (), replayed, since)


def _lower_scale(known: Explanation, attempts: Attempts, scale: float) -> tuple[Remedy, np.ndarray | None]:
    """A lower loss scale as a remedy, and the number of non-zero values of each gradient at that scale."""
    attempt = attempts.take_at(scale / (known.loss_scale or 1.0))
    constant = attempts.to_blame is not None and isinstance(attempts.to_blame.strategy, scaler.Static)
    go = f"use hs.Static({scale:g}), or hs.Dynamic()" if constant else "let the strategy reach it"
    if constant and len(attempts.scalers) > 1:
        go += f", in the loss scaler that is at {attempts.loss_scale:g}"
    why = "gradients that are not finite at a higher scale are zero at this one" if known.flushed_at else None
    advice = f"The step passes at a loss scale of {scale:g}: {go}."
    name, passes = f"loss scale {scale:g}", True
    if known.other_scales:
        every = [(known.loss_scale, scale), *known.other_scales]
        passes = all(fits_at is not None for _, fits_at in every)
        name = ", ".join(f"{now:g} lowered to {fits_at:g}" for now, fits_at in every if fits_at is not None)
        name = f"loss scales: {name}"
        advice = "The step passes only with all of these: a strategy that backs off reaches each by itself."
    return Remedy(Kind.LOSS_SCALE, name, True, passes, attempt.loss, advice, why_not=why), attempt.nonzero


def _may_have_diverged(known: Explanation, attempts: Attempts, found: list[Remedy]) -> bool:
    """Whether the weights may have diverged: no useful scale fits, or the loss has grown and other batches fail."""
    moment, name = attempts.moment, loss_name(attempts.part)
    losses = [row[name] for row in _before(moment, name)]
    now = (moment.logged or {}).get(name)
    grown = bool(losses) and (now is None or now > _GROWN * min(losses))
    useless = known.fits_at is not None and known.fits_at < 1.0
    bad_update = known.verdict in ("too_large", "update")
    in_place = [one for one in found if one.helps and one.kind in IN_PLACE]
    unknown = not losses and known.verdict == "loss" and not in_place
    bad = known.where == "weights"
    return bad or useless or bad_update or ((grown or unknown) and not helped(found, Kind.ANOTHER_BATCH))


def _before(moment: Any, name: str) -> list[dict]:
    """The log's rows of earlier steps that have a loss of this name."""
    return [row for row in moment.rows if row["step"] < moment.step and row.get(name) is not None]


def losses_of_applied(moment: Any, part: str | None = None) -> list[float]:
    """The losses of the earlier applied steps, as the log has them.

    Args:
        moment: The run just before the step.
        part: Of which part of a `ComposedStep`, or None.
    """
    name, applied = loss_name(part), f"{part}/applied" if part else "applied"
    return [row[name] for row in _before(moment, name) if row.get(applied)]


def helped(remedies: Iterable[Remedy], kind: Kind, layer: str | None = None) -> bool:
    """Whether a remedy of this kind, for this layer or for none, was tried and helped."""
    return any(remedy.helps for remedy in remedies if (remedy.kind, remedy.layer) == (kind, layer))


def grown_through(remedies: Iterable[Remedy]) -> str | None:
    """What made the weights diverge, if the steps since the checkpoint pass without it; else None.

    A lower learning rate also lowers the weight decay, so the weight decay is checked first.
    """
    helping = [one.kind for one in remedies if one.helps and one.since_checkpoint]
    if Kind.WEIGHT_DECAY in helping:
        return "weight decay"
    return "learning rate" if Kind.LEARNING_RATE in helping else None


def blame_of(remedies: Sequence[Remedy], where: str | None, fits_at: float | None, moment: Any = None) -> str | None:
    """Either "batch", "dataset" or "weights", or None if none is known to be at fault.

    Args:
        remedies: The remedies that were tried.
        where: Where the failure began.
        fits_at: The loss scale at which the step is finite, or None.
        moment: The run just before the step, whose batches are looked at if it began in the data.
    """
    if where == "data" and (moment is None or example_of(moment.batch) is None):
        # Finite values that became infinite in 16 bits: other batches may hold such values as well.
        return "batch" if helped(remedies, Kind.ANOTHER_BATCH) else None
    if where == "data":
        return "batch" if moment.next_batch is None or example_of(moment.next_batch) is None else "dataset"
    precision = any(one.helps and one.kind in IN_PLACE for one in remedies)
    if helped(remedies, Kind.ANOTHER_BATCH) and fits_at is None and not precision:
        return "batch"
    own = Kind.OWN_VARIABLES_CLEARED
    course = any(remedy.helps for remedy in remedies if remedy.since_checkpoint and remedy.kind is not own)
    return "weights" if where == "weights" or course else None


def weighed(
    remedies: Sequence[Remedy], counts: Counts, failing: Callable[[], np.ndarray | None], losses: Sequence[float]
) -> list[Remedy]:
    """The remedies with `gradients_left`, `loss_ratio`, `helps` and `why_not`.

    Args:
        remedies: The remedies that were tried.
        counts: The counts of the remedies whose gradients are known.
        failing: A function that returns the counts of the failed step, in which non-finite values count as non-zero.
        losses: The losses of the earlier applied steps.
    """
    # Another batch has gradients of its own, which are not comparable.
    comparable = [one for one in remedies if one.finite and one.kind is not Kind.ANOTHER_BATCH]
    own = {one.name: counts[one.name] for one in comparable if one.name in counts}
    due = None
    if own:
        # The most that any remedy leaves of each gradient.
        due = np.max(list(own.values()), axis=0)
        sure = due.all() or any(one.kind is Kind.ALL_IN_FLOAT32 for one in remedies if one.name in own)
        # Gradients that are zero with every remedy may have been flushed by every one.
        lost = None if sure else failing()
        due = due if lost is None else np.where(due > 0, due, lost)
    usual, _ = _usual(remedies, losses)

    def weigh(remedy: Remedy) -> Remedy:
        if not remedy.finite:
            return remedy
        left = None
        if due is not None and due.any() and remedy in comparable and remedy.name in own:
            left = float(np.minimum(own[remedy.name], due).sum()) / float(due.sum())
        ratio = abs(remedy.loss) / usual if usual > 0 and math.isfinite(remedy.loss) else None
        why = absurd_loss(remedy.loss, losses, remedies) or remedy.why_not
        if left is not None and left < _LEAST:
            why = f"it leaves {left:.1%} of the gradients" if left else "it leaves nothing of the gradients"
        return dataclasses.replace(remedy, gradients_left=left, loss_ratio=ratio, helps=why is None, why_not=why)

    return [weigh(one) for one in remedies]


def _usual(remedies: Sequence[Remedy], losses: Sequence[float]) -> tuple[float, str]:
    """The loss to compare with, and where it comes from."""
    before = [abs(loss) for loss in losses if math.isfinite(loss)]
    if before:
        median = float(np.median(before))
        # Of losses that diverge the median is absurd itself.
        diverged = median > _ABSURD * max(before[0], 1.0)
        return before[0] if diverged else median, "of the steps before"
    tried = [abs(one.loss) for one in remedies if one.finite and math.isfinite(one.loss)]
    return min(tried, default=math.nan), "that another remedy gives"


def absurd_loss(loss: float, losses: Sequence[float], remedies: Sequence[Remedy] = ()) -> str | None:
    """Why a step with this loss does not train usefully, as a clause; None if nothing is known against it.

    Args:
        loss: Of the step.
        losses: Of the earlier applied steps.
        remedies: Without such losses, the remedies with whose losses to compare it.
    """
    usual, whose = _usual(remedies, losses)
    if not usual > 0 or not math.isfinite(loss) or abs(loss) <= _ABSURD * max(usual, 1.0):
        return None
    return f"its loss of {loss:.3g} is {abs(loss) / usual:.2g} times the loss {whose}"
