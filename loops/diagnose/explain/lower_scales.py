"""Which lower loss scale a step passes at, and whether only because what is not finite becomes zero there."""

from __future__ import annotations

import math
from collections.abc import Mapping

import keras

from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.measured import measured, true_amax
from loops.diagnose.graph.origin import origins
from loops.diagnose.graph.wider import octaves_over

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


_OPAQUE = ("While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
"""Operations that hold others, and cannot be computed in float32 by themselves."""


def flushes(attempts: Attempts, layers: Mapping[str, keras.layers.Layer], fits_at: float) -> bool:
    """Whether a step is finite at a scale only since gradients that have no finite value at any are zero there.

    Args:
        attempts: Of the step.
        layers: The model's, by path.
        fits_at: The largest scale at which it is finite, lower than the step's.
    """
    loss_scale = attempts.loss_scale or 1.0
    here, there = (attempts.take_at(scale / loss_scale).nonzero for scale in (loss_scale, fits_at))
    if here is None or there is None or not here.any():
        return False
    if not there.any():
        return True
    lost = (here > 0) & (there == 0)
    return (fits_at < 1.0 or bool(lost.any())) and not _overflows(attempts, layers, 2.0 * fits_at / loss_scale)


def _overflows(attempts: Attempts, layers: Mapping[str, keras.layers.Layer], factor: float) -> bool:
    """Whether what is not finite, at the lowest scale at which something is not, is finite with more range."""
    attempts.scanned_at = factor
    try:
        seen = measured(attempts, layers)
        first = next(iter(origins(seen.frames, seen.failed)), None)
        if first is None or first.kind in _OPAQUE:
            return True
        return octaves_over(first, true_amax(seen, first)) is not None
    finally:
        attempts.scanned_at = None
