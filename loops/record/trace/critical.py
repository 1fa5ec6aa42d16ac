"""The critical scale: the largest power of two at which everything measured would still have been finite.

It follows from the largest magnitude of each tensor. A gradient of a scaled loss is x S at the loss scale S, rounded,
and would be x P at another one, P; it stays finite as long as x P lies below the format's overflow threshold, 65520 in
float16. What does not carry the scale, such as an activation or a weight, is finite at every scale or at none.

Where a gradient's format is not certain, its share is an interval: at least what its narrow format says, at most what
float32 says. A step whose gradients were all finite proves more: the scale was not too high.

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
from loops.record.trace.tensors import Tensor

_FLOAT32 = scaler.float_format("float32")
_ABOVE = 1.0 + 2.0**-52
"""Just above 1: the largest power of two below this many times a scale may be the scale itself."""


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
    for limits, certain in {(tensor.limits, tensor.certain) for tensor in tensors}:
        chosen = [tensor.carries_scale and (tensor.limits, tensor.certain) == (limits, certain) for tensor in tensors]
        least, most = _scaled(seen[:, chosen], scales, limits) if certain else _unsure(seen[:, chosen], scales, limits)
        low, high = (
            np.minimum(low, least.min(axis=1, initial=np.inf)),
            np.minimum(high, most.min(axis=1, initial=np.inf)),
        )
    # What was finite at this scale is finite at it: no narrower format says otherwise.
    carries = np.array([tensor.carries_scale for tensor in tensors], bool)
    proven = _largest_power(scales[:, 0] * _ABOVE, np.ones(len(seen)), np.zeros(len(seen), bool))
    low = np.where(np.isfinite(seen[:, carries]).all(axis=1), np.maximum(low, proven), low)
    high = np.maximum(high, low)
    unscaled = seen[:, [not tensor.carries_scale for tensor in tensors]]
    finite = np.isfinite(unscaled).all(axis=1)
    return Critical(np.where(finite, low, 0.0), np.where(finite, high, 0.0))


def _unsure(amax: np.ndarray, scale: np.ndarray, limits: scaler.FloatFormat) -> tuple[np.ndarray, np.ndarray]:
    """At least what a narrow format says, at most what float32 says.

    A value above what the narrow format holds may be a sum in float32 of parts that the narrow format held until now.
    """
    return _scaled(amax, scale, limits)[0], _scaled(amax, scale, _FLOAT32)[1]


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
