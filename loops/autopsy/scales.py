"""The loss scale at which a step passes."""

from __future__ import annotations

import math

from loops.autopsy.attempts import Attempts

_SMALLEST_SCALE = -14
"""log2 of the scale at which float16's backward pass can hardly overflow any more."""


def fitting_scale(attempts: Attempts, loss_scale: float) -> float | None:
    """The largest power of two below the step's loss scale at which the step is finite; None if there is none.

    Args:
        attempts: Of the step.
        loss_scale: The step's.
    """
    top = math.ceil(math.log2(loss_scale))

    def finite(exponent: int) -> bool:
        return attempts.take_at(2.0**exponent / loss_scale).finite

    low, high = _SMALLEST_SCALE, top
    if not any(finite(low := start) for start in (min(0, top - 1), _SMALLEST_SCALE)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return 2.0**low
