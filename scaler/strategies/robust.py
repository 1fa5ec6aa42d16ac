"""The last values of a number, and the limit that their median and their spread draw for the next one."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from scaler.checks import as_float
from scaler.strategies import exact

_SIGMA = 1.4826
"""A normal distribution has this many times its median distance from the median as its standard deviation."""
_LEAST = 0.1
"""The least spread, as a share of the median."""


def flushed(value: Any) -> tf.Tensor:
    """In float32, with 0 for a subnormal number, on which kernels disagree."""
    return exact.narrow(exact.wide(value))


def entered(window: tf.Tensor, value: tf.Tensor, enters: tf.Tensor) -> tf.Tensor:
    """The window with the value in place of the oldest one, where it enters.

    Args:
        window: Float32 [size, ...], the newest last.
        value: Float32 [...].
        enters: Bool, of the shape of the value or of its last axes.
    """
    return tf.where(enters, tf.concat([window[1:], value[tf.newaxis]], axis=0), window)


def limit_of(window: tf.Tensor, factor: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """The median of a window, and the limit for the next value, float32 [...].

    The limit is infinite while half of the window is empty, which counts as infinite, and where all of it is 0.

    Args:
        window: Float32 [size, ...].
        factor: How many spreads above the median the limit lies, a number or a scalar tensor.
    """
    usual = _median(window)
    distance = exact.narrow(exact.wide(_SIGMA) * exact.wide(_median(tf.abs(window - usual))))
    spread = tf.maximum(distance, exact.narrow(exact.wide(_LEAST) * exact.wide(tf.abs(usual))))
    limit = exact.narrow(exact.wide(usual) + exact.wide(as_float(factor)) * exact.wide(spread))
    known = tf.logical_and(tf.math.is_finite(usual), spread > 0.0)
    return usual, tf.where(known, limit, math.inf)


def _median(values: tf.Tensor) -> tf.Tensor:
    """The median along the first axis."""
    size, rank = values.shape[0], values.shape.rank
    last = values if rank == 1 else tf.transpose(values, [*range(1, rank), 0])
    # `tf.sort` asks for the shape, which takes int32 arithmetic.
    ordered = tf.math.top_k(last, k=size).values
    middle = exact.wide(ordered[..., size // 2]) + exact.wide(ordered[..., (size - 1) // 2])
    return exact.narrow(middle * 0.5)
