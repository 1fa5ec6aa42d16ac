"""The norms of each gradient of the last steps, and what they say of those of the next one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.strategies import exact
from scaler.strategies.robust import entered, flushed, limit_of

FIELDS = ("tensor_norms", "tensor_usual", "tensor_limits")
"""Those of a state, in the order of a `TensorNorms`."""


class TensorNorms(NamedTuple):
    """The last norms of some gradients, each with a window of its own.

    Attributes:
        norms: Float32 [window, variables], the newest last; infinity where nothing was seen yet.
        usual: Float32 [variables], their medians.
        limits: Float32 [variables], the most that the next step allows.
    """

    norms: tf.Tensor
    usual: tf.Tensor
    limits: tf.Tensor


class Farthest(NamedTuple):
    """The gradient that lies farthest beyond its limit, as a ratio: scalar tensors.

    Attributes:
        some: Bool, whether there is one.
        place: Int64, its position among the variables.
        value: Float32, its norm.
        usual: Float32, its median.
        limit: Float32, the most that was allowed.
        count: Int64, how many lie beyond theirs.
    """

    some: tf.Tensor
    place: tf.Tensor
    value: tf.Tensor
    usual: tf.Tensor
    limit: tf.Tensor
    count: tf.Tensor


def unknown(window: int, variables: int) -> TensorNorms:
    """Before the first step."""
    none = tf.fill([variables], math.inf)
    return TensorNorms(tf.fill([window, variables], math.inf), none, none)


def after(known: TensorNorms, norms: tf.Tensor, applied: tf.Tensor, factor: Any) -> TensorNorms:
    """After a step. A norm that is not finite does not enter: that of a gradient which the step did not have is NaN.

    Args:
        known: Before the step.
        norms: Float32 [variables], of the unscaled gradients.
        applied: Scalar bool.
        factor: How many spreads above the median of a window the limit lies, a number or a scalar tensor.
    """
    window = entered(known.norms, norms, tf.logical_and(applied, tf.math.is_finite(norms)))
    return TensorNorms(window, *limit_of(window, factor))


def farthest(known: TensorNorms, norms: tf.Tensor) -> Farthest:
    """Which gradient of a step lies beyond its limit, and how far.

    Args:
        known: Before the step, of at least one variable.
        norms: Float32 [variables], of the unscaled gradients; NaN for a gradient which the step did not have.
    """
    beyond = norms > known.limits
    excess = tf.where(beyond, exact.wide(norms) / exact.wide(known.limits), tf.zeros([], tf.float64))
    place = tf.argmax(excess, axis=0)
    here = tf.one_hot(place, norms.shape[0], True, False, axis=0)
    value, usual, limit = (
        tf.reduce_sum(tf.where(here, each, 0.0), axis=0) for each in (norms, known.usual, known.limits)
    )
    count = tf.math.count_nonzero(beyond, axis=0)
    return Farthest(tf.reduce_any(beyond, axis=0), place, value, usual, limit, count)


def factors(known: TensorNorms, norms: tf.Tensor) -> tf.Tensor:
    """What each gradient is multiplied by so that it lies at its limit, [variables]: exactly 1 where it is below it.

    Args:
        known: Before the step.
        norms: Float32 or float64 [variables], of the unscaled gradients; NaN for a gradient which the step did not
            have.

    Returns:
        Of the dtype of the norms: float32 may hold neither the norm of a float64 gradient nor its factor.
    """
    norms = tf.convert_to_tensor(norms)
    narrow = flushed(norms)
    norms = norms if norms.dtype == tf.float64 else narrow
    return tf.where(narrow > known.limits, tf.cast(known.limits, norms.dtype) / norms, tf.ones_like(norms))
