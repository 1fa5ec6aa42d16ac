"""What float16 makes of the sample's gradients where nothing scales the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import rounding_is_no_warning
from loops.diagnose.graph.twin import in_float32
from loops.support.batches import parts


def lost_share(model: keras.Model, loss: Callable, sample: Any) -> str:
    """The share of the weights' gradients that float16 makes zero, as a sentence; empty where float32 does not run.

    The gradients are those of the model in float32. It moves statistics and random generators, which the caller keeps.
    """
    x, y, weight = parts(sample, "lint")

    def count() -> tf.Tensor:
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            result = loss(y, prediction) if weight is None else loss(y, prediction, weight)
            value = tf.cast(result[0] if isinstance(result, tuple) else result, tf.float32)
        gradients = tape.gradient(value, model.trainable_variables)
        return scaler.observe.exponents([one for one in gradients if one is not None])

    try:
        with in_float32(scaler.observe.layers_of(model)), rounding_is_no_warning():
            counts = tf.function(count)().numpy()
    except (ValueError, TypeError, tf.errors.OpError):
        return ""
    if not counts.sum():
        return ""
    lost = scaler.observe.cast(counts, scaler.float_format("float16")).underflow
    return f"Of the sample's gradients in float32, {lost.low:.1%} to {lost.high:.1%} are zero in float16."
