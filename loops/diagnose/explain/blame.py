"""Orders the remedies by what helped, and decides whether the batch, the dataset or the weights are to blame."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaler
from loops.diagnose.explain.attempts import Attempts, loss_name
from loops.diagnose.explain.examples import example_of
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import IN_PLACE, Kind, Proposal, Remedy, try_proposals
from loops.diagnose.explain.since_checkpoint import try_since_checkpoint
from loops.diagnose.explain.worth import weighed

_SURE = (Kind.OWN_VARIABLES_CLEARED, Kind.WEIGHT_DECAY)
"""A remedy of these kinds that helps also shows the cause."""
_GROWN = 100.0
"""If the loss exceeds the smallest loss before it by this factor, training has diverged."""


def in_order(known: Explanation, attempts: Attempts, proposed: list[Proposal]) -> list[Remedy]:
    """Tries the proposals, and returns the remedies: those that help first, and among them the smallest change first.

    Args:
        known: What is known about the step so far.
        attempts: The attempts at the step.
        proposed: The proposals to try; if empty, only the loss scale that fits is tried.
    """
    moment = attempts.moment
    found, counts = try_proposals(attempts, proposed)
    for scale in (known.fits_at, known.flushed_at):
        if scale is not None:
            lower, left = _lower_scale(known, attempts, scale)
            counts |= {} if left is None else {lower.name: left}
            # A scale below 1 makes gradients smaller than they are, which does not cure anything.
            found = [lower, *found] if scale >= 1.0 else [*found, lower]
    applied = losses_of_applied(moment, attempts.part)

    def weigh(remedies: list[Remedy]) -> list[Remedy]:
        return weighed(remedies, counts, lambda: attempts.take_at(attempts.scanned_at or 1.0).nonzero, applied)

    if proposed and not known.lost_weight and _may_have_diverged(known, attempts, weigh(found)):
        found = [*try_since_checkpoint(attempts, applied), *found]

    def place(remedy: Remedy) -> tuple:
        far = remedy.loss_ratio is not None and remedy.loss_ratio > _GROWN
        hides = remedy.kind is Kind.DERIVATIVES_ZEROED
        return not remedy.helps, not remedy.finite, far, hides, remedy.kind not in _SURE

    return sorted(weigh(found), key=place)


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


def helped(remedies: list[Remedy], kind: Kind, layer: str | None = None) -> bool:
    """Whether a remedy of this kind, for this layer or for none, was tried and helped."""
    return any(remedy.helps for remedy in remedies if (remedy.kind, remedy.layer) == (kind, layer))


def grown_through(remedies: list[Remedy]) -> str | None:
    """What made the weights diverge, if the steps since the checkpoint pass without it; else None.

    A lower learning rate also lowers the weight decay, so the weight decay is checked first.
    """
    helping = [one.kind for one in remedies if one.helps and one.since_checkpoint]
    if Kind.WEIGHT_DECAY in helping:
        return "weight decay"
    return "learning rate" if Kind.LEARNING_RATE in helping else None


def blame_of(remedies: list[Remedy], where: str | None, fits_at: float | None, moment: Any = None) -> str | None:
    """Either "batch", "dataset" or "weights", or None if none is known to be at fault.

    Args:
        remedies: The remedies that were tried.
        where: Where the failure began.
        fits_at: The loss scale at which the step is finite, or None.
        moment: The run just before the step, whose batches are looked at if it began in the data.
    """
    if where == "data":
        return _of_data(remedies, moment)
    precision = any(one.helps and one.kind in IN_PLACE for one in remedies)
    if helped(remedies, Kind.ANOTHER_BATCH) and fits_at is None and not precision:
        return "batch"
    own = Kind.OWN_VARIABLES_CLEARED
    course = any(remedy.helps for remedy in remedies if remedy.since_checkpoint and remedy.kind is not own)
    return "weights" if where == "weights" or course else None


def _of_data(remedies: list[Remedy], moment: Any) -> str | None:
    if moment is None or example_of(moment.batch) is None:
        # Finite values that became infinite in 16 bits: other batches may hold such values as well.
        return "batch" if helped(remedies, Kind.ANOTHER_BATCH) else None
    return "batch" if moment.next_batch is None or example_of(moment.next_batch) is None else "dataset"
