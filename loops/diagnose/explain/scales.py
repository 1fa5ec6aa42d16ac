"""The loss scale at which a step passes."""

from __future__ import annotations

import math

from loops.diagnose.explain.attempts import Attempts

_SMALLEST_SCALE = -14
"""log2 of the scale at which float16's backward pass can hardly overflow any more."""


def fitting_scale(attempts: Attempts, loss_scale: float) -> float | None:
    """The largest power of two below the step's loss scale at which its gradients are finite; None if there is none.

    Args:
        attempts: Of the step.
        loss_scale: The step's.
    """
    low, high = _start(attempts, loss_scale), math.ceil(math.log2(loss_scale))
    if low is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _finite(attempts, loss_scale, middle) else (low, middle)
    return 2.0**low


def passes_at_none(attempts: Attempts) -> bool:
    """Whether a step that is not finite is so neither at a loss scale of 1 nor at the smallest.

    Args:
        attempts: Of the step.
    """
    scale = attempts.loss_scale
    return scale is not None and _start(attempts, scale) is None


def _start(attempts: Attempts, loss_scale: float) -> int | None:
    """log2 of a lower scale at which the step's gradients are finite, or None."""
    starts = (min(0, math.ceil(math.log2(loss_scale)) - 1), _SMALLEST_SCALE)
    return next((start for start in starts if _finite(attempts, loss_scale, start)), None)


def _finite(attempts: Attempts, loss_scale: float, exponent: int) -> bool:
    return attempts.take_at(2.0**exponent / loss_scale).applied
