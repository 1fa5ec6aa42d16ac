"""The last values of numbers, and the limits that their medians and their spreads draw for the next ones."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.checks import as_float
from scaler.strategies import exact

FIELDS = ("tensor_norms", "tensor_usual", "tensor_limits")
"""The fields of a state with the `Window` of each gradient's norm."""
_SIGMA = 1.4826
"""A normal distribution has this many times its median distance from the median as its standard deviation."""
_LEAST = 0.1
"""The least spread, as a share of the median."""


class Window(NamedTuple):
    """The last values of a number, or of several.

    Attributes:
        values: Float32 [size, ...], the newest last; infinity where nothing was seen yet.
        usual: Float32 [...], their medians.
        limit: Float32 [...], the most that the next step allows.
    """

    values: tf.Tensor
    usual: tf.Tensor
    limit: tf.Tensor


def unknown(size: int, *shape: int) -> Window:
    """Before the first step."""
    none = tf.fill(tf.constant(shape, tf.int32), math.inf)
    return Window(tf.fill([size, *shape], math.inf), none, none)


def flushed(value: Any) -> tf.Tensor:
    """In float32, with 0 for a subnormal number, on which kernels disagree."""
    return exact.narrow(exact.wide(value))


def after(known: Window, value: tf.Tensor, applied: tf.Tensor, factor: Any) -> Window:
    """After a step. A value that is not finite does not enter: the norm of a gradient that a step did not have is NaN.

    The limit is infinite while half of the window is empty, which counts as infinite, and where all of it is 0.

    Args:
        known: Before the step.
        value: Float32 [...].
        applied: Scalar bool.
        factor: How many spreads above the median the limit lies, a number or a scalar tensor.
    """
    enters = tf.logical_and(applied, tf.math.is_finite(value))
    values = tf.where(enters, tf.concat([known.values[1:], value[tf.newaxis]], axis=0), known.values)
    usual = _median(values)
    distance = exact.narrow(exact.wide(_SIGMA) * exact.wide(_median(tf.abs(values - usual))))
    spread = tf.maximum(distance, exact.narrow(exact.wide(_LEAST) * exact.wide(tf.abs(usual))))
    limit = exact.narrow(exact.wide(usual) + exact.wide(as_float(factor)) * exact.wide(spread))
    has_limit = tf.logical_and(tf.math.is_finite(usual), spread > 0.0)
    return Window(values, usual, tf.where(has_limit, limit, math.inf))


def _median(values: tf.Tensor) -> tf.Tensor:
    """The median along the first axis."""
    size, rank = values.shape[0], values.shape.rank
    last = values if rank == 1 else tf.transpose(values, [*range(1, rank), 0])
    # `tf.sort` asks for the shape, which takes int32 arithmetic.
    ordered = tf.math.top_k(last, k=size).values
    middle = exact.wide(ordered[..., size // 2]) + exact.wide(ordered[..., (size - 1) // 2])
    return exact.narrow(middle * 0.5)
