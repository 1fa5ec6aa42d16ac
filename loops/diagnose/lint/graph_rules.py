"""Rules that read the traced graph: constants, moving statistics, indices and shapes."""

from __future__ import annotations

import keras
import tensorflow as tf

from loops.diagnose.graph.calls import Traced
from loops.diagnose.graph.literals import lost_literals
from loops.diagnose.graph.operations import CONVOLUTIONS, MATRICES, root_of
from loops.diagnose.lint.finding import Finding, Kind, note
from loops.support.text import agreeing, amount


def lost_constants(traced: Traced, twin: Traced) -> list[Finding]:
    """A finding for each constant whose value in float16 has another meaning than in float32."""
    findings: dict[tuple, Finding] = {}
    for one in lost_literals(traced.graph, twin.graph):
        layer = traced.place_of_node(one.node)
        make = note if one.chosen else Finding
        key = (layer, one.before, one.after, one.chosen)
        findings.setdefault(key, make(layer, f"{one.problem}.", one.measured, one.instead, Kind.CONSTANT))
    return list(findings.values())


_NARROW = {"float16": "2^-11", "bfloat16": "2^-8"}
"""Formats in which a moving statistic stalls, with the smallest part of a number that every number can still gain."""
_AVERAGING = ("AddV2", "Add", "Sub", "Mul", "Cast")
"""What a moving average makes of its old value."""


def narrow_statistics(traced: Traced) -> list[Finding]:
    """A finding for each layer whose moving averages, such as BatchNormalization's, are stored in 16 bits."""
    handles = {id(outer): inner for outer, inner in traced.graph.captures}
    found: dict[int, tuple[keras.layers.Layer, list]] = {}
    seen: set[int] = set()
    for layer in traced.layers:  # Inner layers come first, so a variable counts as its own layer's.
        for variable in layer.non_trainable_variables:
            handle = handles.get(id(getattr(variable.value, "handle", None)))
            if variable.dtype in _NARROW and handle is not None and id(variable) not in seen and _averages(handle):
                found.setdefault(id(layer), (layer, []))[1].append(variable)
            seen.add(id(variable))
    return [_stalls(traced.place(layer), layer, variables) for layer, variables in found.values()]


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


def _stalls(place: str, layer: keras.layers.Layer, variables: list) -> Finding:
    dtype, kind = variables[0].dtype, type(layer).__name__
    name = f"keras.layers.{kind}" if type(layer).__module__.startswith("keras.") else kind
    infinite = " Those of a channel with a variance above 65504 do not move at all." if dtype == "float16" else ""
    return Finding(
        place,
        f"its moving statistics are stored in {dtype}: small updates are rounded away, so they stop short of the true "
        "values, and inference is wrong without a warning.",
        f"{amount(len(variables), 'variable')} {agreeing(len(variables), 'has', 'have')} 16 bits, such as "
        f"{variables[0].path!r}: an update smaller than {_NARROW[dtype]} of its value is lost.{infinite}",
        f"Give this layer dtype='mixed_{dtype}', which keeps its variables in float32: "
        f"{name}(..., dtype='mixed_{dtype}')."
        if layer.variable_dtype == dtype
        else "Create them in float32: add_weight(..., trainable=False, dtype='float32').",
        Kind.STATISTICS,
    )


_LAST_INTEGER = 2048
_GATHERS = ("GatherV2", "ResourceGather")
_ON_THE_WAY = ("Cast", "StridedSlice", "SelectV2", "AddV2")
"""What Keras makes of indices: it wraps negative ones."""


def rounded_indices(traced: Traced) -> list[Finding]:
    """A finding for each Embedding whose indices are float16 on the way and exceed float16's exact integers."""
    large = {
        traced.place(layer): layer.input_dim
        for layer in traced.layers
        if isinstance(layer, keras.layers.Embedding) and layer.input_dim > _LAST_INTEGER + 1
    }
    places = {
        traced.place_of_node(operation.name)
        for operation in traced.graph.get_operations()
        if operation.type in _GATHERS and _were_half(operation.inputs[1])
    }
    return [
        Finding(
            place,
            "the indices are float16 on their way to this Embedding, so many of them are rounded to their neighbours.",
            f"float16 represents every integer up to {_LAST_INTEGER}, and this Embedding has {rows} rows.",
            "Use integers in the batch, and keras.Input(..., dtype='int32') in the model.",
            Kind.INDICES,
        )
        for place, rows in large.items()
        if place in places
    ]


def _were_half(tensor: tf.Tensor) -> bool:
    while tensor.dtype != tf.float16:
        tensor = root_of(tensor)
        if tensor.op.type not in _ON_THE_WAY:
            return False
        tensor = tensor.op.inputs[2 if tensor.op.type == "SelectV2" else 0]  # Inputs 0 and 1: condition, fill value.
    return True


_MULTIPLE = 8


def odd_shapes(traced: Traced) -> list[Finding]:
    """A note for each layer that multiplies in float16 by a matrix with a side that is not a multiple of 8."""
    matrices: dict[str | None, tuple] = {}
    for operation in traced.graph.get_operations():
        if operation.type in MATRICES | CONVOLUTIONS and operation.outputs[0].dtype == tf.float16:
            shape = operation.inputs[1].shape
            place = traced.place_of_node(operation.name)
            if shape.rank is not None and _odd(shape.as_list()):
                matrices.setdefault(place, tuple(shape.as_list()))
    for layer in traced.layers:  # A recurrent layer computes its step in a loop, in another graph.
        if isinstance(layer, keras.layers.RNN) and layer.compute_dtype == "float16":
            shape = tuple(getattr(getattr(layer.cell, "recurrent_kernel", None), "shape", ()))
            if _odd(list(shape)):
                matrices.setdefault(traced.place(layer), shape)
    return [_note(place, shape) for place, shape in matrices.items()]


def _odd(shape: list) -> list[int]:
    return [size for size in shape[-2:] if size and size % _MULTIPLE]


def _note(place: str | None, shape: tuple) -> Finding:
    odd = _odd(list(shape))
    return note(
        place,
        "tensor cores multiply float16 in blocks of 8: this layer's products are padded, or do not use them.",
        f"It multiplies by a matrix of shape {shape}, and {' and '.join(map(str, odd))} "
        f"{'are not multiples' if len(odd) > 1 else 'is not a multiple'} of 8.",
        f"Use {' and '.join(str(-(-size // _MULTIPLE) * _MULTIPLE) for size in odd)}, if you can choose the size.",
        Kind.SHAPES,
    )
