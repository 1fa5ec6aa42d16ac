"""The critical scale: the largest power of two at which everything measured would still have been finite.

It follows from the largest magnitude of each tensor. A gradient of a scaled loss is x S at the loss scale S, rounded,
and would be x P at another one, P; it stays finite as long as x P lies below the format's overflow threshold, 65520 in
float16. What does not carry the scale, such as an activation or a weight, is finite at every scale or at none.

The answers are intervals. A gradient above the smallest normal number, seen at a power of two, gives both ends alike:
at any scale it is rounded in the same place. One that is infinite or NaN says that the scale was too high,
and not by how much: 0 to the next power of two below it. Of one that is subnormal or zero, rounding has hidden the
value that a higher scale would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import scaler
from loops.trace.tensors import Tensor


class Critical(NamedTuple):
    """For each step what the critical scale is at least and at most: float64 [steps], alike where it is known.

    Attributes:
        low: 0 where a tensor was not finite; infinity where no scale would make one so.
        high: 0 where an activation or a weight was not finite: no scale helps.
    """

    low: np.ndarray
    high: np.ndarray


def critical_scales(amax: np.ndarray, loss_scale: np.ndarray, tensors: Sequence[Tensor]) -> Critical:
    """The critical scale of each step.

    Args:
        amax: Float [steps, tensors], the largest magnitudes as they were measured; NaN where a value was NaN.
        loss_scale: Float [steps], the scales at which they were measured: finite and above 0.
        tensors: What they were measured of.
    """
    seen = np.asarray(amax, np.float64)
    scales = np.asarray(loss_scale, np.float64)[:, np.newaxis]
    low, high = np.full(len(seen), np.inf), np.full(len(seen), np.inf)
    # All tensors of a format at once: a visit of one step has many tensors.
    for limits in {tensor.limits for tensor in tensors}:
        columns = seen[:, [tensor.carries_scale and tensor.limits == limits for tensor in tensors]]
        least, most = _scaled(columns, scales, limits)
        low, high = (
            np.minimum(low, least.min(axis=1, initial=np.inf)),
            np.minimum(high, most.min(axis=1, initial=np.inf)),
        )
    unscaled = seen[:, [not tensor.carries_scale for tensor in tensors]]
    finite = np.isfinite(unscaled).all(axis=1)
    return Critical(np.where(finite, low, 0.0), np.where(finite, high, 0.0))


def _scaled(amax: np.ndarray, scale: np.ndarray, limits: scaler.FloatFormat) -> tuple[np.ndarray, np.ndarray]:
    finite = np.isfinite(amax)
    value = np.where(finite, amax, 0.0)
    _, exponent = np.frexp(value)
    step = np.maximum(np.ldexp(limits.epsilon, exponent - 1), limits.smallest_subnormal)
    step = np.where(value == 0, limits.smallest_subnormal, step)
    # Below a power of two neighbours lie half as far apart.
    is_power = (np.frexp(value)[0] == 0.5) & (step > limits.smallest_subnormal)
    least, most = np.maximum(value - np.where(is_power, step / 4, step / 2), 0.0), value + step / 2
    # Ties go to the even neighbour, so an odd value is what nothing at its ends rounds to.
    odd = np.remainder(value / step, 2) == 1
    reached = limits.overflow_threshold * scale
    low = _largest_power(reached, most, inclusive=odd)
    high = np.where(least > 0, _largest_power(reached, least, inclusive=np.zeros_like(odd)), np.inf)
    below = _largest_power(scale, np.ones_like(scale), inclusive=np.zeros_like(odd))
    return np.where(finite, low, 0.0), np.where(finite, high, below)


def _largest_power(limit: np.ndarray, value: np.ndarray, inclusive: np.ndarray) -> np.ndarray:
    """The largest power of two that takes a value to less than the limit, or to the limit where that is allowed."""
    limit_part, limit_exponent = np.frexp(limit)
    part, exponent = np.frexp(np.where(value > 0, value, 1.0))
    fits = (part < limit_part) | (inclusive & (part == limit_part))
    return np.ldexp(1.0, limit_exponent - exponent - np.where(fits, 0, 1))
