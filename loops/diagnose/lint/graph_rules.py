"""Rules that read the layers and the traced graph: weights, constants, moving statistics, indices and shapes."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import trace
from loops.diagnose.graph.changes import layers_in_float32
from loops.diagnose.graph.literals import lost_literals
from loops.diagnose.graph.operations import CONVOLUTIONS, MATRICES, root_of
from loops.diagnose.lint.finding import Finding, Kind, Severity, Texts
from loops.diagnose.lint.set_up import SMALLEST_UPDATE
from loops.diagnose.lint.subject import Subject
from loops.support.text import agreeing, amount

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
        stack = [operation.inputs[1]] if operation.type == "AssignVariableOp" else []
        while stack:
            source = root_of(stack.pop()).op
            if source.type == "ReadVariableOp" and source.inputs[0] is handle:
                return True
            if source.type in _AVERAGING:
                stack += list(source.inputs)
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
