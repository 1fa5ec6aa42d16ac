"""The constants of unit scaling: one factor for a pass forward, others for the passes back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaler.errors import InvalidArgument

_POINTS = 4096
_NORMAL = np.array([statistics.NormalDist().inv_cdf((number + 0.5) / _POINTS) for number in range(_POINTS)], np.float32)
"""Quantiles of a standard normal law."""


def scaled(values: tf.Tensor, forward: Any = 1.0, backward: Any = 1.0) -> tf.Tensor:
    """Values multiplied by one constant on the way forward, and their gradient by another on the way back.

    Args:
        values: Of any floating dtype. The result has it, too.
        forward: A constant, or a scalar that depends on shapes alone.
        backward: The same.

    Raises:
        InvalidArgument: From the gradient of a gradient, which would be of neither.
    """
    if isinstance(forward, float) and isinstance(backward, float) and forward == backward == 1.0:
        return values

    @tf.custom_gradient
    def behind(upstream: tf.Tensor) -> tuple:
        def again(_: tf.Tensor) -> tf.Tensor:
            raise InvalidArgument(
                "unit_scaled: a gradient of gradients, as a gradient penalty takes it. Unit scaling multiplies the "
                "gradients of a pass back by constants of their own, so they are not those of the loss. Leave the "
                "penalty out, or train the model as it was, with a loss scale."
            )

        return upstream * tf.cast(backward, upstream.dtype), again

    @tf.custom_gradient
    def ahead(values: tf.Tensor) -> tuple:
        return values * tf.cast(forward, values.dtype), behind

    return ahead(values)


def factors_of_sizes(fan_in: float, fan_out: float, free: bool) -> tuple[float, float]:
    """The factors of a product and of the gradient of its inputs, which have as many terms as these sizes say.

    Args:
        fan_in: The terms of a sum in the product.
        fan_out: The terms of a sum in the gradient of the inputs.
        free: Whether they may differ. Otherwise both are the geometric mean.
    """
    return together(fan_in**-0.5, fan_out**-0.5, free)


def together(forward: float, backward: float, free: bool) -> tuple[float, float]:
    """Two factors as they are, or their geometric mean twice if they must not differ."""
    mean = math.sqrt(forward * backward)
    return (forward, backward) if free else (mean, mean)


def factors_of_function(function: Callable, name: str, free: bool) -> tuple[float, float]:
    """The factors of an activation function of standard normal numbers: of its values, and of its slopes.

    Each makes a mean square one. The variance of values with a mean, as those of ReLU, is then less than one, but the
    next product sums their squares: with a variance of one its own would be 1.47, and grow from layer to layer.

    Args:
        function: Of one tensor.
        name: Of the layer, for the error.
        free: Whether they may differ.

    Raises:
        InvalidArgument: If a value of the function depends on more than one number, as of softmax.
    """
    with tf.GradientTape() as tape:
        numbers = tf.constant(_NORMAL)
        tape.watch(numbers)
        values = function(numbers[None])[0]
    reversed_values = function(tf.reverse(numbers, [0])[None, : _POINTS // 2])[0]
    if not np.allclose(reversed_values, values[::-1][: _POINTS // 2], atol=1e-5):
        raise InvalidArgument(
            f"{name}: an activation function whose values depend on several numbers has no rule of unit scaling. Put "
            "it into the loss, or train the model as it is, with a loss scale."
        )
    if np.array_equal(values, numbers):
        return 1.0, 1.0
    slopes = tape.gradient(values, numbers)
    return together(1 / _root_mean_square(values), 1 / _root_mean_square(slopes), free)


def _root_mean_square(values: tf.Tensor) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def factor_of_attention(keys: int | tf.Tensor, causal: bool) -> tf.Tensor:
    """The factor of a mixture of independent values, whose weights are the softmax of standard normal scores.

    Of n values it has a variance of e / n, and of one value that of the value. With a causal mask the n-th
    position mixes n values: the mean over positions becomes 1.

    Args:
        keys: The number of positions.
        causal: Whether there is a causal mask.

    Returns:
        Scalar float32.
    """
    count = tf.cast(keys, tf.float32)
    seen = tf.range(1.0, count + 1.0) if causal else count[None]
    return tf.math.rsqrt(tf.reduce_mean(math.e / (seen - 1.0 + math.e)))


def terms(values: tf.Tensor, axes: Sequence[int]) -> Any:
    """The number of positions along some axes: an int if it is known, otherwise a scalar float32."""
    known = [values.shape[axis] for axis in axes]
    if None not in known:
        return math.prod(known)
    dynamic = tf.shape(values)
    return tf.reduce_prod(tf.stack([tf.cast(dynamic[axis], tf.float32) for axis in axes]))
