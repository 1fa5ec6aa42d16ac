"""Finds a lower loss scale at which a step passes, and checks that it does not merely flush gradients to zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import keras

import scaler
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.scan_results import amax_in_float32, scan_step
from loops.diagnose.graph.origin import octaves_over, origins

_SMALLEST_SCALE = -14
"""log2 of a scale at which a float16 backward pass can hardly overflow."""


def fitting_scale(attempts: Attempts, loss_scale: float) -> float | None:
    """The largest power of two below the step's loss scale at which its gradients are finite, or None.

    It is a smaller one if there is no time to look for the largest.

    Args:
        attempts: The attempts at the step.
        loss_scale: The loss scale of the step.
    """
    return _largest(attempts, loss_scale, lambda factor: attempts.take_at(factor).applied)


def fitting_scales(attempts: Attempts) -> list[tuple[float, float | None]]:
    """For each scaler whose gradients are not finite its loss scale, and the largest that fits its own gradients.

    Args:
        attempts: The attempts at a step with several such scalers.
    """
    found = []
    with attempts.deciding() as decided:
        for one in attempts.guilty:
            loss_scale = float(one.loss_scale)

            def finite(factor: float, one: scaler.LossScaler = one) -> bool:
                return all(passed for owner, passed in decided(factor) if owner is one)

            found.append((loss_scale, _largest(attempts, loss_scale, finite)))
    return found


def _largest(attempts: Attempts, loss_scale: float, finite: Callable[[float], bool]) -> float | None:
    """The largest power of two below a loss scale at which a step is finite, as `finite` says of a factor; or None."""
    low, high = _start(loss_scale, finite), math.ceil(math.log2(loss_scale))
    if low is None:
        return None
    while high - low > 1 and attempts.in_time():
        middle = (low + high) // 2
        low, high = (middle, high) if finite(2.0**middle / loss_scale) else (low, middle)
    return 2.0**low


def passes_at_none(attempts: Attempts) -> bool:
    """Whether a step that failed is finite neither at a loss scale of 1 nor at the smallest one.

    Args:
        attempts: The attempts at the step.
    """
    scale = attempts.loss_scale
    return scale is not None and _start(scale, lambda factor: attempts.take_at(factor).applied) is None


def _start(loss_scale: float, finite: Callable[[float], bool]) -> int | None:
    """log2 of a lower scale at which the step's gradients are finite, or None."""
    starts = (min(0, math.ceil(math.log2(loss_scale)) - 1), _SMALLEST_SCALE)
    return next((start for start in starts if finite(2.0**start / loss_scale)), None)


_OPAQUE = ("While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
"""Operations that call functions, and cannot be computed alone in float32."""


def flushes(attempts: Attempts, layers: Mapping[str, keras.layers.Layer], fits_at: float) -> bool:
    """Whether a step is finite at a scale only because gradients that are finite at no scale become zero there.

    Args:
        attempts: The attempts at the step.
        layers: The layers of the model, by path.
        fits_at: The largest scale at which the step is finite, lower than its own.
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
    """Whether the first non-finite tensor, at the lowest scale that fails, would be finite in a wider format."""
    attempts.scanned_at = factor
    try:
        seen = scan_step(attempts, layers)
        first = next(iter(origins(seen.frames, seen.failed)), None)
        if first is None or first.kind in _OPAQUE:
            return True
        return octaves_over(first, amax_in_float32(seen, first)) is not None
    finally:
        attempts.scanned_at = None
