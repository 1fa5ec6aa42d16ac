"""Products whose sizes the tensor cores of a GPU cannot use whole."""

from __future__ import annotations

import keras
import tensorflow as tf

from loops.diagnose.graph.calls import Traced
from loops.diagnose.lint.finding import Finding, Kind, note

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
