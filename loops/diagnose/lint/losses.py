"""Checks the dtypes of the model's outputs and of the loss, and which gradients of the sample float16 loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import Traced, loss_of, rounding_is_no_warning
from loops.diagnose.graph.models import layers_in_float32
from loops.diagnose.graph.operations import MOVES
from loops.diagnose.lint.finding import Finding, Kind
from loops.support.batches import parts

_PREDICTIONS = (0.0, 1e-4, 0.5, 1.0, 300.0, 5e3)


def half_outputs(traced: Traced, model_name: str) -> list[Finding]:
    """A finding for each output of the model that is float16."""
    findings = []
    for prediction in traced.predictions:
        if prediction.dtype == tf.float16:
            made = [
                call.layer for call in traced.calls if any(one is prediction for one in tf.nest.flatten(call.outputs))
            ]
            layer = traced.place(made[0]) if made else model_name
            findings.append(
                Finding(
                    layer,
                    "the loss gets float16 predictions: a probability close to 1 is rounded to 1, one below 6e-8 is "
                    "0, and a logit above 65504 is infinite.",
                    f"For the sample this output has dtype float16 and shape {tuple(prediction.shape)}.",
                    "Give the last layer dtype='float32'; the products before it stay in float16.",
                    Kind.OUTPUT,
                )
            )
    return findings


def half_loss(traced: Traced, loss: Callable, sample: Any) -> list[Finding]:
    """A finding if the loss itself computes in float16."""
    operations = _computed_in_half(traced)
    if not operations:
        return []
    name = getattr(loss, "__name__", type(loss).__name__)
    kinds = ", ".join(sorted({operation.type for operation in operations}))
    tried = _tried(loss, sample, traced.predictions)
    return [
        Finding(
            None,
            f"the loss {name} computes in float16: keras.losses objects cast their inputs to float32, but functions "
            "do not.",
            f"{len(operations)} of its operations are in float16 ({kinds}). {tried}".strip(),
            "Pass the object instead of the function, such as keras.losses.BinaryCrossentropy(), or cast the "
            "predictions to float32 first.",
            Kind.LOSS,
        )
    ]


def _computed_in_half(traced: Traced) -> list[tf.Operation]:
    """The operations between the predictions and the loss that compute in float16."""
    seen = {id(prediction) for prediction in traced.predictions}
    found, stack = {}, [traced.loss]
    while stack:
        tensor = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        operation = tensor.op
        # Keras may read the logits in front of a softmax, so the predictions are bypassed.
        if operation.type in ("Const", "Placeholder") or operation.name in traced.model_operations:
            continue
        if operation.type not in MOVES | {"Cast"} and any(one.dtype == tf.float16 for one in operation.outputs):
            found[operation.name] = operation
        stack += list(operation.inputs)
    return list(found.values())


def _tried(loss: Callable, sample: Any, predictions: list[tf.Tensor]) -> str:
    """A sentence on the first predictions at which the loss or its gradient fails in float16 only; else ""."""
    _, y, weight = parts(sample, "lint")
    if len(predictions) != 1:
        return ""
    for value in _PREDICTIONS:
        prediction = tf.fill([size or 1 for size in predictions[0].shape], tf.constant(value, tf.float16))
        try:
            (half, slope), (reference, expected) = (
                _loss_and_slope(loss, y, tf.cast(prediction, dtype), weight) for dtype in (tf.float16, tf.float32)
            )
        except (ValueError, TypeError, tf.errors.OpError):
            return ""  # The loss accepts only the model's own predictions; it is reported without this sentence.
        if not np.isfinite(half) and np.isfinite(reference):
            return f"At predictions of {value:g} it is {half:g}, and {reference:.4g} in float32."
        if not np.isfinite(slope) and np.isfinite(expected):
            return f"At predictions of {value:g} its gradient is {slope:g}, and {expected:.4g} in float32."
    return ""


def _loss_and_slope(loss: Callable, y: Any, prediction: tf.Tensor, weight: Any) -> tuple[float, float]:
    with tf.GradientTape() as tape:
        tape.watch(prediction)
        value = tf.convert_to_tensor(loss_of(loss, prediction, y, weight))
    gradient = tape.gradient(value, prediction, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return float(_worst(value)), float(_worst(gradient))


def _worst(tensor: tf.Tensor) -> np.ndarray:
    """The largest magnitude; NaN if the tensor holds one."""
    return np.max(np.abs(keras.ops.convert_to_numpy(tensor).astype(np.float32)), initial=0.0)


def lost_share(model: keras.Model, loss: Callable, sample: Any) -> str:
    """A sentence on the share of the weights' gradients that float16 flushes to zero; "" if float32 does not run.

    The gradients are computed in float32. The caller restores statistics and random generators.
    """
    x, y, weight = parts(sample, "lint")

    def count() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = tf.cast(loss_of(loss, model(x, training=True), y, weight), tf.float32)
        weights = model.trainable_variables
        gradients = scaler.gradients.derivatives(tape.gradient(value, weights), weights)
        return scaler.observe.exponents([one for one in gradients if one is not None])

    try:
        with layers_in_float32(scaler.observe.layers_of(model)), rounding_is_no_warning():
            counts = tf.function(count)().numpy()
    except (ValueError, TypeError, tf.errors.OpError):
        return ""
    if not counts.sum():
        return ""
    lost = scaler.observe.cast(counts, scaler.float_format("float16")).underflow
    return f"Of the sample's gradients in float32, {lost.low:.1%} to {lost.high:.1%} are zero in float16."
