"""What helped, in order, and whether the batch or the weights are to blame."""

from __future__ import annotations

import math
from typing import Any

import scaler
from loops.autopsy.attempts import Attempts
from loops.autopsy.course import SINCE, tried_from_checkpoint
from loops.autopsy.explanation import Explanation
from loops.autopsy.remedies import ANOTHER_BATCH, HIDES, OWN, Proposal, Remedy, tried

_ABSURD = 1e4
"""A loss that is so many times the largest before it shows a remedy that does not train."""


_GROWN = 100.0
"""A loss that is so many times the least before it has left where it was."""


def in_order(known: Explanation, attempts: Attempts, proposed: list[Proposal]) -> list[Remedy]:
    """What was tried, with what helps first, and of that what changes least."""
    found = tried(attempts, proposed)
    if known.fits_at is not None:
        constant = any(isinstance(one.strategy, scaler.Static) for one in attempts.scalers)
        go = f"use scaler.Static({known.fits_at:g}), or scaler.Dynamic()" if constant else "let the strategy go there"
        said = f"The step passes at a loss scale of {known.fits_at:g}: {go}."
        lower = Remedy(f"loss scale {known.fits_at:g}", True, True, math.nan, said)
        # Below 1 the scale makes gradients smaller than they are: that is no cure.
        found = [lower, *found] if known.fits_at >= 1.0 else [*found, lower]
    if _gone_bad(known, attempts.moment, found):
        found = [*tried_from_checkpoint(attempts), *found]
    usual = max((abs(loss) for loss in _losses_before(attempts.moment)), default=math.inf)

    def place(remedy: Remedy) -> tuple:
        absurd = math.isfinite(remedy.loss) and abs(remedy.loss) > _ABSURD * max(usual, 1.0)
        return not remedy.finite, absurd, HIDES in remedy.name, not remedy.name.startswith(OWN)

    return sorted(found, key=place)


def _gone_bad(known: Explanation, moment: Any, found: list[Remedy]) -> bool:
    """Whether the weights may have: no scale of use fits, or the loss has grown, or other batches fail, too."""
    losses = _losses_before(moment)
    now = (moment.logged or {}).get("loss")
    grown = bool(losses) and (now is None or now > _GROWN * min(losses))
    useless = known.fits_at is not None and known.fits_at < 1.0
    bad_update = known.verdict in ("too_large", "update")
    in_place = [one for one in found if one.finite and one.name.endswith(" in float32") and "'" in one.name]
    unknown = not losses and known.verdict == "loss" and not in_place
    bad = known.where == "weights"
    return bad or useless or bad_update or ((grown or unknown) and not helped(found, ANOTHER_BATCH))


def _losses_before(moment: Any) -> list[float]:
    return [row["loss"] for row in moment.rows if row["step"] < moment.step and row.get("loss") is not None]


def helped(remedies: list[Remedy], name: str) -> bool:
    """Whether the remedy of this name was tried and did."""
    return any(remedy.finite for remedy in remedies if remedy.name == name)


def blame_of(remedies: list[Remedy], where: str, fits_at: float | None) -> str | None:
    """The "batch", the "weights", or None where neither is known to be at fault."""
    if where == "data":
        return "batch"
    precision = any(one.finite and "'" in one.name and one.name.endswith(" in float32") for one in remedies)
    if helped(remedies, ANOTHER_BATCH) and fits_at is None and not precision:
        return "batch"
    course = any(remedy.finite for remedy in remedies if SINCE in remedy.name)
    return "weights" if where == "weights" or course else None
