"""Rules about the set-up: whether loss scaling, masters, outputs and the loss fit the dtypes of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import Traced, derivatives_of, loss_of, rounding_is_no_warning
from loops.diagnose.graph.changes import layers_in_float32
from loops.diagnose.graph.operations import MOVES, needed
from loops.diagnose.lint.finding import Finding, Kind, Texts
from loops.diagnose.lint.subject import Subject
from loops.support.batches import parts
from loops.support.text import agreeing, amount

_NO_SCALING = Texts(
    Kind.NO_SCALING,
    "the model computes in float16 and nothing scales the loss: gradients below 6e-8 become 0.",
    "{layers} in float16, such as {first!r}; {scaling}. {lost}",
    "Use hs.TrainStep with loss_scaler=hs.LossScaler(hs.Dynamic()), or wrap the optimizer in hs.LossScaleOptimizer.",
)
_NEEDLESS_SCALING = Texts(
    Kind.NEEDLESS_SCALING,
    "the model computes in bfloat16, which has the range of float32, but the loss is scaled: that gains nothing, and "
    "every overflow that it causes skips a step.",
    "{layers} in bfloat16, such as {first!r}, and none in float16; {scaling}.",
    "Use loss_scaler=hs.LossScaler(hs.NoScaling()), or the optimizer without a wrapper.",
)
_NO_MASTERS = Texts(
    Kind.NO_MASTERS,
    "weights are stored in {dtype} and trained without float32 masters: an update smaller than {ratio} of its weight "
    "is lost.",
    "{count} of {all} {have} 16 bits, such as {path!r}; {scaling}.",
    "Use hs.TrainStep or hs.LossScaleOptimizer, which create masters automatically, or the policy 'mixed_{dtype}'.",
)
_LOSS = Texts(
    Kind.LOSS,
    "the loss {name} computes in float16: keras.losses objects cast their inputs to float32, but functions do not.",
    "{count} of its operations are in float16 ({kinds}). {tried}",
    "Pass the object instead of the function, such as keras.losses.BinaryCrossentropy(), or cast the predictions to "
    "float32 first.",
)
_OUTPUT = Texts(
    Kind.OUTPUT,
    "the loss gets float16 predictions: a probability close to 1 is rounded to 1, one below 6e-8 is 0, and a logit "
    "above 65504 is infinite.",
    "For the sample this output has dtype float16 and shape {shape}.",
    "Give the last layer dtype='float32'; the products before it stay in float16.",
)
SMALLEST_UPDATE = {"float16": "2^-11", "bfloat16": "2^-8"}
"""The smallest part of a number that every number of a format can still gain."""
_PREDICTIONS = (0.0, 1e-4, 0.5, 1.0, 300.0, 5e3)


def fitting_scaling(subject: Subject) -> Iterator[Finding]:
    """Compute dtypes that need a loss scaler and have none, or need none and have one."""
    half, brain = (_computing_in(dtype, subject.traced) for dtype in ("float16", "bfloat16"))
    scales, _, scaling = subject.scaling
    if half and not scales:
        lost = lost_share(subject.model, subject.loss, subject.sample)
        yield _NO_SCALING.at(None, layers=_layers(half), first=half[0], scaling=scaling, lost=lost)
    if brain and not half and scales:
        yield _NEEDLESS_SCALING.at(None, layers=_layers(brain), first=brain[0], scaling=scaling)


def _computing_in(dtype: str, traced: Traced) -> list[str]:
    layers = [one for one in traced.layers if not isinstance(one, keras.layers.InputLayer)]
    return [layer.name for layer in layers if layer.compute_dtype == dtype]


def _layers(names: list[str]) -> str:
    return f"{amount(len(names), 'layer')} {agreeing(len(names), 'computes', 'compute')}"


def missing_masters(subject: Subject) -> Iterator[Finding]:
    """16-bit weights that are trained without masters."""
    weights = subject.model.trainable_variables
    found = [one for one in weights if one.dtype in SMALLEST_UPDATE]
    if found and not subject.scaling.has_masters:
        yield _NO_MASTERS.at(
            None,
            dtype=found[0].dtype,
            ratio=SMALLEST_UPDATE[found[0].dtype],
            count=len(found),
            all=amount(len(weights), "trainable variable"),
            have=agreeing(len(found), "has", "have"),
            path=found[0].path,
            scaling=subject.scaling.description,
        )


def half_outputs(subject: Subject) -> Iterator[Finding]:
    """Outputs of the model that are float16."""
    traced = subject.traced
    returned = [(call.layer, one) for call in traced.calls for one in tf.nest.flatten(call.outputs)]
    for prediction in traced.predictions:
        if prediction.dtype == tf.float16:
            layer = next((layer for layer, one in returned if one is prediction), None)
            place = subject.model.name if layer is None else traced.place(layer)
            yield _OUTPUT.at(place, shape=tuple(prediction.shape))


def half_loss(subject: Subject) -> Iterator[Finding]:
    """A loss that itself computes in float16."""
    traced = subject.traced
    # Keras may read the logits in front of a softmax: operations of the model are told by their names.
    own = [one for one in needed([traced.loss.op]) if one.name not in traced.model_operations]
    computing = [one for one in own if one.type not in MOVES | {"Cast"}]
    operations = [one for one in computing if any(output.dtype == tf.float16 for output in one.outputs)]
    if operations:
        yield _LOSS.at(
            None,
            name=getattr(subject.loss, "__name__", type(subject.loss).__name__),
            count=len(operations),
            kinds=", ".join(sorted({operation.type for operation in operations})),
            tried=_tried(subject.loss, subject.sample, traced.predictions),
        )


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

    @tf.function
    def count() -> tf.Tensor:
        return scaler.observe.exponents(derivatives_of(model, loss, sample))

    try:
        with layers_in_float32(scaler.observe.layers_of(model)), rounding_is_no_warning():
            counts = count().numpy()
    except (ValueError, TypeError, tf.errors.OpError):
        return ""
    if not counts.sum():
        return ""
    lost = scaler.observe.cast(counts, scaler.float_format("float16")).underflow
    return f"Of the sample's gradients in float32, {lost.low:.1%} to {lost.high:.1%} are zero in float16."
