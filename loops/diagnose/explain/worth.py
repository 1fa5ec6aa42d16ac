"""Rates remedies by the share of the gradients that they leave, and by the loss. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from loops.diagnose.explain.remedies import Kind, Remedy

_LEAST = 0.1
"""With a smaller share of its gradients a step hardly trains."""
_ABSURD = 1e4
"""If the loss exceeds the usual loss by this factor, the step does not train usefully."""
Counts = Mapping[str, np.ndarray]
"""The number of non-zero values of each gradient, by the name of the remedy."""


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
    passing = {one.name: counts[one.name] for one in remedies if one.finite and one.name in counts}
    due = _due(
        [one for one in remedies if one.name in passing and one.kind is not Kind.ANOTHER_BATCH], passing, failing
    )
    usual, whose = _usual(remedies, losses)
    return [_weighed(one, passing.get(one.name), due, usual, whose) for one in remedies]


def _due(remedies: Sequence[Remedy], passing: Counts, failing: Callable[[], np.ndarray | None]) -> np.ndarray | None:
    """The expected number of non-zero values of each gradient: the most that any remedy leaves."""
    if not remedies:
        return None
    most = np.max([passing[one.name] for one in remedies], axis=0)
    if most.all() or any(one.kind is Kind.ALL_IN_FLOAT32 for one in remedies):
        return most
    # Gradients that are zero with every remedy may have been flushed by every one.
    lost = failing()
    return most if lost is None else np.where(most > 0, most, lost)


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


def absurd_loss(loss: float, losses: Sequence[float]) -> str | None:
    """Why a step with this loss does not train usefully, as a clause; None if nothing is known against it.

    Args:
        loss: Of the step.
        losses: Of the earlier applied steps.
    """
    return _absurd(loss, *_usual([], losses))


def _absurd(loss: float, usual: float, whose: str) -> str | None:
    if not usual > 0 or not math.isfinite(loss) or abs(loss) <= _ABSURD * max(usual, 1.0):
        return None
    return f"its loss of {loss:.3g} is {abs(loss) / usual:.2g} times the loss {whose}"


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
    else:
        why = _absurd(remedy.loss, usual, whose) or why
    return dataclasses.replace(remedy, gradients_left=left, loss_ratio=ratio, helps=why is None, why_not=why)
