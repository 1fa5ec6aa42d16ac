"""Whether a lower loss scale helps only because what is not finite becomes zero: then there was no overflow."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.measured import measured, true_amax
from loops.diagnose.graph.origin import origins
from loops.diagnose.graph.wider import octaves_over

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
