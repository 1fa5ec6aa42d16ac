"""Tries whether gradients that are all zero are not at a larger loss scale."""

from __future__ import annotations

import dataclasses
import math

from loops.diagnose.explain.attempts import Attempt, Attempts
from loops.diagnose.explain.explanation import Explanation

_OCTAVES = (8, 16, 24, 32, 40)
"""The scale is raised by so many, until the step is no longer finite."""
_MOST = 2.0**126
"""The largest loss scale that there is."""


def with_zero_gradients(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation of an applied step, with the verdict "zero" if its gradients are and its loss is not.

    Args:
        known: What is known about the step so far.
        attempts: The attempts at the step.
        attempt: The attempt as the run takes it.
    """
    lost = attempt.outputs.get("grad_norm") == 0 and attempt.loss != 0 and math.isfinite(attempt.loss)
    if not lost:
        return known
    known = dataclasses.replace(known, verdict="zero", nonzero=_count(attempts.take_at(1.0)))
    if known.nonzero:
        return known
    for octaves in _OCTAVES:
        scale = (known.loss_scale or 1.0) * 2.0**octaves
        raised = attempts.take_at(2.0**octaves)
        if not raised.finite or scale > _MOST:
            break
        if _count(raised) > (known.nonzero or 0):
            known = dataclasses.replace(known, nonzero=_count(raised), nonzero_at=scale)
    return known


def _count(attempt: Attempt) -> int:
    return 0 if attempt.nonzero is None else int(attempt.nonzero.sum())
