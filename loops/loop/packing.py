"""Tensors of different dtypes as one array of bytes, so that the host copies the results of a call once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

Layout = Sequence[tuple[tf.DType, Sequence[int]]]
"""The dtype and the shape of each tensor."""


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates the bytes of all tensors: uint8 [total].

    Args:
        tensors: Numbers and bools of any shape.
    """
    return tf.concat([tf.reshape(_bytes(tensor), [-1]) for tensor in tensors], axis=0)


def unpack(data: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The inverse of `pack`, on the host. The arrays do not share memory with `data`.

    Args:
        data: What `pack` returned.
        layout: The dtype and the shape of each tensor, in their order.
    """
    found, start = [], 0
    for dtype, shape in layout:
        kind = np.dtype(dtype.as_numpy_dtype)
        end = start + kind.itemsize * math.prod(shape)
        found.append(data[start:end].view(kind).reshape(shape).copy())
        start = end
    return found


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype in (tf.bool, tf.uint8):
        return tf.cast(tensor, tf.uint8)
    return tf.bitcast(tensor, tf.uint8)
