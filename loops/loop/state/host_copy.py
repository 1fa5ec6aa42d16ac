"""A copy of what a checkpoint holds, in host memory that each save uses again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loops.backend.checkpoints import values

_ALIGNMENT = 64
"""Bytes. TensorFlow copies memory that begins elsewhere."""
_SHARED = (tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8)
"""Dtypes that NumPy passes on without a copy."""


class Copied(NamedTuple):
    """A value of a checkpoint that no step changes.

    Attributes:
        name: Its name in the file.
        slices: Which part of the name's value it is.
        value: An array in the memory of the copy, or a tensor.
        dtype: The value's own: the array may have another of the same size.
    """

    name: str
    slices: str
    value: np.ndarray | tf.Tensor
    dtype: tf.DType

    @property
    def tensor(self) -> tf.Tensor:
        """The value, in the same memory."""
        if isinstance(self.value, tf.Tensor):
            return self.value
        shared = tf.experimental.dlpack.from_dlpack(self.value.__dlpack__())
        return shared if shared.dtype == self.dtype else tf.bitcast(shared, self.dtype)


class HostCopy:
    """Copies all values of a checkpoint. A further copy overwrites the one before.

    New memory takes a system longer to give than a copy takes. So it is asked for once.

    Args:
        checkpoint: Its variables on the host are counted now. What does not fit later gets memory of its own.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        self._checkpoint = checkpoint
        self._memory = np.empty(_size(checkpoint) + _ALIGNMENT, np.uint8)
        self._first = -self._memory.ctypes.data % _ALIGNMENT

    def get_memory(self) -> None:
        """Has the system give all of the memory."""
        np.copyto(self._memory, np.uint8(0))

    def take(self) -> list[Copied]:
        """Copies all values as they are now. Those of other devices, which are copies already, are kept as they are."""
        copied, place = [], self._first
        for name, slices, tensor, fetched in values(self._checkpoint):
            value: np.ndarray | tf.Tensor = tensor
            if tensor.dtype in (*_SHARED, tf.bfloat16) and not fetched:
                source = np.asarray(tensor)
                source = source.view(np.int16) if tensor.dtype == tf.bfloat16 else source
                value = self._room(place, source)
                np.copyto(value, source)
                place += _rounded(source.nbytes)
            elif tensor.dtype != tf.variant and not fetched:  # The variants of iterators are never written again.
                value = tf.constant(tensor.numpy(), tensor.dtype)
            copied.append(Copied(name, slices, value, tensor.dtype))
        return copied

    def _room(self, place: int, like: np.ndarray) -> np.ndarray:
        """An array from a place in the memory on; one of its own where that ends before."""
        part = self._memory[place : place + like.nbytes]
        return part.view(like.dtype).reshape(like.shape) if part.nbytes == like.nbytes else np.empty_like(like)


def _size(checkpoint: tf.train.Checkpoint) -> int:
    found = tf.train.TrackableView(checkpoint).descendants()
    known = [one for one in found if isinstance(one, tf.Variable) and one.shape.is_fully_defined()]
    return sum(_rounded(one.shape.num_elements() * one.dtype.size) for one in known if "CPU" in one.device)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
