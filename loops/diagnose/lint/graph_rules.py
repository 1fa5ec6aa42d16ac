"""Rules that read the traced graph: constants, indices and shapes."""

from __future__ import annotations

import keras
import tensorflow as tf

from loops.diagnose.graph.calls import Traced
from loops.diagnose.graph.literals import lost_literals
from loops.diagnose.lint.finding import Finding, Kind, note


def lost_constants(traced: Traced, twin: Traced) -> list[Finding]:
    """A finding for each constant of a float16 graph that means something else than in float32."""
    findings: dict[tuple, Finding] = {}
    for one in lost_literals(traced.graph, twin.graph):
        layer = traced.place_of_node(one.node)
        make = note if one.chosen else Finding
        key = (layer, one.before, one.after, one.chosen)
        findings.setdefault(key, make(layer, f"{one.said}.", one.measured, one.instead, Kind.CONSTANT))
    return list(findings.values())


_LAST_INTEGER = 2048
_GATHERS = ("GatherV2", "ResourceGather")
_MOVES = ("Cast", "Identity", "Reshape", "Squeeze", "ExpandDims", "StridedSlice", "SelectV2", "AddV2")


def rounded_indices(traced: Traced) -> list[Finding]:
    """A finding for each Embedding that has more rows than float16 has integers, and is given them in float16."""
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
            "the indices are float16 on their way to this Embedding, so that many of them become their neighbours.",
            f"float16 has every integer up to {_LAST_INTEGER}, and this Embedding has {rows} rows.",
            "Give integers in the batch, and the model keras.Input(..., dtype='int32').",
            Kind.INDICES,
        )
        for place, rows in large.items()
        if place in places
    ]


def _were_half(tensor: tf.Tensor) -> bool:
    while tensor.dtype != tf.float16:
        if tensor.op.type not in _MOVES:
            return False
        tensor = tensor.op.inputs[2 if tensor.op.type == "SelectV2" else 0]  # After the condition and its other value.
    return True


_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D")
_MULTIPLE = 8


def odd_shapes(traced: Traced) -> list[Finding]:
    """A note for each layer that multiplies in float16 by a matrix with a side that is no multiple of 8."""
    matrices: dict[str | None, tuple] = {}
    for operation in traced.graph.get_operations():
        if operation.type in _PRODUCTS and operation.outputs[0].dtype == tf.float16:
            shape = operation.inputs[1].shape
            place = traced.place_of_node(operation.name)
            if shape.rank is not None and _odd(shape.as_list()):
                matrices.setdefault(place, tuple(shape.as_list()))
    for layer in traced.layers:  # The step of a recurrent layer is in a loop, with a graph of its own.
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
        "tensor cores take products of float16 in blocks of 8: this layer's are padded, or computed without them.",
        f"It multiplies by a matrix of shape {shape}, and {' and '.join(map(str, odd))} "
        f"{'are' if len(odd) > 1 else 'is'} no multiple of 8.",
        f"Use {' and '.join(str(-(-size // _MULTIPLE) * _MULTIPLE) for size in odd)}, where the size is yours.",
        Kind.SHAPES,
    )
