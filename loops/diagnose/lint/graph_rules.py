"""Rules that read the set-up, the layers and the traced graph: scaling, masters, weights, constants, shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import layers_in_float32, rounding_is_no_warning
from loops.diagnose.graph.literals import lost_literals
from loops.diagnose.graph.models import Traced, derivatives_of, loss_of, trace
from loops.diagnose.graph.operations import CONVOLUTIONS, MATRICES, needed, reached, root_of
from loops.diagnose.lint.subject import Finding, Kind, Severity, Subject, Texts
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
    computing = [one for one in own if one.type != "Cast" and not scaler.authoring.operation_of_type(one.type).moves]
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


_CONSTANT = Texts(Kind.CONSTANT, "{problem}.", "{measured}", "{instead}")
_WEIGHTS = Texts(
    Kind.WEIGHTS,
    "a weight is too large for float16, the layer's compute dtype.",
    "The largest magnitude of {path} is {amax:g}; float16 ends at 65504.",
    "Find out why it grew (learning rate, missing weight decay), or give this layer dtype='float32'.",
)
_NORMALIZATION = Texts(
    Kind.STATISTICS,
    "the {name} with which it normalises is too large for float16.",
    "{layer}.{name} is infinite; float16 ends at 65504.",
    "Give this layer dtype='float32' and adapt it again: keras.layers.Normalization(..., dtype='float32').",
)
_MOVING = Texts(
    Kind.STATISTICS,
    "its moving statistics are stored in {dtype}: small updates are rounded away, so they stop short of the true "
    "values, and inference is wrong without a warning.",
    "{count} {have} 16 bits, such as {path!r}: an update smaller than {ratio} of its value is lost.{infinite}",
    "{instead}",
)
_INDICES = Texts(
    Kind.INDICES,
    "the indices are float16 on their way to this Embedding, so many of them are rounded to their neighbours.",
    "float16 represents every integer up to 2048, and this Embedding has {rows} rows.",
    "Use integers in the batch, and keras.Input(..., dtype='int32') in the model.",
)
_SHAPES = Texts(
    Kind.SHAPES,
    "tensor cores multiply float16 in blocks of 8: this layer's products are padded, or do not use them.",
    "It multiplies by a matrix of shape {shape}, and {odd} {are} of 8.",
    "Use {rounded}, if you can choose the size.",
    Severity.NOTE,
)
_LARGEST = scaler.float_format("float16").max
_AVERAGING = ("AddV2", "Add", "Sub", "Mul", "Cast")
"""What a moving average makes of its old value."""
_LAST_INTEGER = 2048
_GATHERS = ("GatherV2", "ResourceGather")
_ON_THE_WAY = ("Cast", "StridedSlice", "SelectV2", "AddV2")
"""What Keras makes of indices: it wraps negative ones."""
_MULTIPLE = 8


def lost_constants(subject: Subject) -> Iterator[Finding]:
    """Constants whose value in float16 has another meaning than in float32."""
    try:
        with layers_in_float32(scaler.observe.layers_of(subject.model)):
            twin = trace(subject.model, subject.loss, subject.sample)
    except (ValueError, TypeError):
        return  # The model casts to float16 by itself; its layers are stressed all the same.
    seen = set()
    for one in lost_literals(subject.traced.graph, twin.graph):
        layer = subject.traced.place_of_node(one.node)
        key = (layer, one.before, one.after, one.chosen)
        if key not in seen:
            seen.add(key)
            texts = _CONSTANT._replace(severity=Severity.NOTE if one.chosen else Severity.HURTS)
            yield texts.at(layer, problem=one.problem, measured=one.measured, instead=one.instead)


def large_weights(subject: Subject) -> Iterator[Finding]:
    """Layers that compute in float16 and have a weight of their own beyond its range."""
    for layer in subject.traced.layers:
        if layer.compute_dtype != "float16":
            continue
        inner = {id(variable) for one in scaler.observe.layers_of(layer)[1:] for variable in one.weights}
        for variable in layer.trainable_variables:
            amax = float(np.max(np.abs(np.asarray(variable.numpy(), np.float32)), initial=0.0))
            if id(variable) not in inner and not amax <= _LARGEST:
                yield _WEIGHTS.at(subject.traced.place(layer), path=variable.path, amax=amax)
                break


def infinite_normalizations(subject: Subject) -> Iterator[Finding]:
    """Normalizations whose mean or variance, which they hold in their compute dtype, is infinite."""
    for layer in subject.traced.layers:
        if isinstance(layer, keras.layers.Normalization) and layer.compute_dtype == "float16":
            for name, value in (("mean", layer.mean), ("variance", layer.variance)):
                if value is not None and not np.all(np.isfinite(np.asarray(value))):
                    yield _NORMALIZATION.at(subject.traced.place(layer), name=name, layer=layer.name)
                    break


def narrow_statistics(subject: Subject) -> Iterator[Finding]:
    """Layers whose moving averages, such as BatchNormalization's, are stored in 16 bits."""
    handles = {id(outer): inner for outer, inner in subject.traced.graph.captures}
    seen: set[int] = set()
    for layer in subject.traced.layers:  # Inner layers come first, so a variable counts as its own layer's.
        found = []
        for variable in layer.non_trainable_variables:
            handle = handles.get(id(getattr(variable.value, "handle", None)))
            if variable.dtype in SMALLEST_UPDATE and handle is not None and id(variable) not in seen:
                found += [variable] if _averages(handle) else []
            seen.add(id(variable))
        if found:
            yield _moving(subject.traced.place(layer), layer, found)


def _averages(handle: tf.Tensor) -> bool:
    """Whether the graph adds to a variable: its new value is a sum that holds the old one.

    A state that is replaced, as SpectralNormalization's vectors and a recurrent layer's states are, does not stall.
    """
    for operation in handle.consumers():
        if operation.type in ("AssignAddVariableOp", "AssignSubVariableOp"):
            return True
        assigned = [root_of(operation.inputs[1]).op] if operation.type == "AssignVariableOp" else []
        for source in reached(
            assigned, lambda one: [root_of(value).op for value in one.inputs] if one.type in _AVERAGING else ()
        ):
            if source.type == "ReadVariableOp" and source.inputs[0] is handle:
                return True
    return False


def _moving(place: str, layer: keras.layers.Layer, variables: list) -> Finding:
    dtype = variables[0].dtype
    beyond = " Those of a channel with a variance above 65504 do not move at all."
    mixed = (
        f"Give this layer dtype='mixed_{dtype}', which keeps its variables in float32: "
        f"{constructor_of(layer)}(..., dtype='mixed_{dtype}')."
    )
    own = "Create them in float32: add_weight(..., trainable=False, dtype='float32')."
    return _MOVING.at(
        place,
        dtype=dtype,
        count=amount(len(variables), "variable"),
        have=agreeing(len(variables), "has", "have"),
        path=variables[0].path,
        ratio=SMALLEST_UPDATE[dtype],
        infinite=beyond if dtype == "float16" else "",
        instead=mixed if layer.variable_dtype == dtype else own,
    )


def constructor_of(layer: keras.layers.Layer) -> str:
    """The class of a layer as a program writes it."""
    kind = type(layer)
    return f"keras.layers.{kind.__name__}" if kind.__module__.startswith("keras.") else kind.__name__


def rounded_indices(subject: Subject) -> Iterator[Finding]:
    """Embeddings whose indices are float16 on the way and exceed float16's exact integers."""
    traced = subject.traced
    operations = [one for one in traced.graph.get_operations() if one.type in _GATHERS]
    places = {traced.place_of_node(one.name) for one in operations if _were_half(one.inputs[1])}
    for layer in traced.layers:
        large = isinstance(layer, keras.layers.Embedding) and layer.input_dim > _LAST_INTEGER + 1
        if large and traced.place(layer) in places:
            yield _INDICES.at(traced.place(layer), rows=layer.input_dim)


def _were_half(tensor: tf.Tensor) -> bool:
    while tensor.dtype != tf.float16:
        tensor = root_of(tensor)
        if tensor.op.type not in _ON_THE_WAY:
            return False
        tensor = tensor.op.inputs[2 if tensor.op.type == "SelectV2" else 0]  # Inputs 0 and 1: condition, fill value.
    return True


def odd_shapes(subject: Subject) -> Iterator[Finding]:
    """Layers that multiply in float16 by a matrix with a side that is not a multiple of 8."""
    traced = subject.traced
    found = [
        (traced.place_of_node(one.name), one.inputs[1].shape.as_list())
        for one in traced.graph.get_operations()
        if one.type in MATRICES | CONVOLUTIONS and one.outputs[0].dtype == tf.float16 and one.inputs[1].shape.rank
    ]
    for layer in traced.layers:  # A recurrent layer computes its step in a loop, in another graph.
        if isinstance(layer, keras.layers.RNN) and layer.compute_dtype == "float16":
            kernel = getattr(layer.cell, "recurrent_kernel", None)
            found.append((traced.place(layer), list(getattr(kernel, "shape", ()))))
    matrices: dict[str | None, list] = {}
    for place, shape in found:
        if _odd(shape):
            matrices.setdefault(place, shape)
    for place, shape in matrices.items():
        yield _SHAPES.at(
            place,
            shape=tuple(shape),
            odd=" and ".join(map(str, _odd(shape))),
            are="are not multiples" if len(_odd(shape)) > 1 else "is not a multiple",
            rounded=" and ".join(str(-(-size // _MULTIPLE) * _MULTIPLE) for size in _odd(shape)),
        )


def _odd(shape: list) -> list[int]:
    return [size for size in shape[-2:] if size and size % _MULTIPLE]
