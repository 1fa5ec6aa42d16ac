"""Indices that are float16 on their way to an Embedding: a subclassed model casts floats that it is given."""

from __future__ import annotations

import keras
import tensorflow as tf

from loops.diagnose.graph.calls import Traced
from loops.diagnose.lint.finding import Finding, Kind

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
