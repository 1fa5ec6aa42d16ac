"""What a remedy is worth: how much of the gradients it leaves, and at which loss. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from loops.diagnose.explain.remedies import Kind, Remedy

_LEAST = 0.1
"""With a smaller share of its gradients a step trains next to nothing."""
_ABSURD = 1e4
"""A loss that is so many times the usual one is none to train from."""
Counts = Mapping[str, np.ndarray]
"""By remedy: of each gradient, how many values are not zero."""


def weighed(
    remedies: Sequence[Remedy], counts: Counts, failing: Callable[[], np.ndarray | None], losses: Sequence[float]
) -> list[Remedy]:
    """The remedies with what they are worth.

    Args:
        remedies: Those that were tried.
        counts: Of those of them whose gradients are known.
        failing: Gives the counts of the step as it failed, in which what is not finite is not zero.
        losses: Of the steps before that were applied.
    """
    passing = {one.name: counts[one.name] for one in remedies if one.finite and one.name in counts}
    due = _due(
        [one for one in remedies if one.name in passing and one.kind is not Kind.ANOTHER_BATCH], passing, failing
    )
    usual, whose = _usual(remedies, losses)
    return [_weighed(one, passing.get(one.name), due, usual, whose) for one in remedies]


def _due(remedies: Sequence[Remedy], passing: Counts, failing: Callable[[], np.ndarray | None]) -> np.ndarray | None:
    """How many values of each gradient there should be: as many as any remedy leaves."""
    if not remedies:
        return None
    most = np.max([passing[one.name] for one in remedies], axis=0)
    if most.all() or any(one.kind is Kind.ALL_IN_FLOAT32 for one in remedies):
        return most
    # What is zero with each of them may have been flushed by each.
    lost = failing()
    return most if lost is None else np.where(most > 0, most, lost)


def _usual(remedies: Sequence[Remedy], losses: Sequence[float]) -> tuple[float, str]:
    """The loss to compare with, and whose it is."""
    before = [abs(loss) for loss in losses if math.isfinite(loss)]
    if before:
        return float(np.median(before)), "of the steps before"
    tried = [abs(one.loss) for one in remedies if one.finite and math.isfinite(one.loss)]
    return min(tried, default=math.nan), "that another remedy gives"


def _weighed(remedy: Remedy, counts: np.ndarray | None, due: np.ndarray | None, usual: float, whose: str) -> Remedy:
    if not remedy.finite:
        return remedy
    left = None
    if counts is not None and due is not None and due.any() and remedy.kind is not Kind.ANOTHER_BATCH:
        left = float(np.minimum(counts, due).sum()) / float(due.sum())
    ratio = abs(remedy.loss) / usual if usual > 0 and math.isfinite(remedy.loss) else None
    why = remedy.why_not
    if left is not None and left < _LEAST:
        why = f"it leaves {left:.1%} of the gradients" if left else "it leaves nothing of the gradients"
    elif ratio is not None and abs(remedy.loss) > _ABSURD * max(usual, 1.0):
        why = f"its loss of {remedy.loss:.3g} is {ratio:.2g} times the loss {whose}"
    return dataclasses.replace(remedy, gradients_left=left, loss_ratio=ratio, helps=why is None, why_not=why)
