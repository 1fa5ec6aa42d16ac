"""The last batches that a loop took, held by reference, for whoever repeats a step right after it."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loops.loop.batch_files import writable

_BYTES = 2**27
"""The most memory for the batches of one call."""
_UNKNOWN = 16
"""How many batches of unknown size are held until one has been seen."""
_ALONE = 2
"""How many batches are held of calls that take one step: that of the last step, and one to compare it with."""


class HeldBatches:
    """The last batches of the newest call: of a call of many steps as many as fit into 128 MiB, but at least two.

    Nothing is copied. The host, or a list in the graph, refers to the tensors that the dataset gave. The last of the
    list's batches takes the place of the oldest.

    Args:
        element_spec: The dataset's.

    Attributes:
        possible: Whether batches can be held: not those with a dataset inside.
        most: How many batches of the next call are held.
    """

    def __init__(self, element_spec: Any):
        self.possible = writable(element_spec)
        self._spec = element_spec
        self._specs = tf.nest.flatten(element_spec, expand_composites=True)
        known = self.possible and all(spec.shape.is_fully_defined() for spec in self._specs)
        self.most = _most(self._specs) if known else _UNKNOWN
        self._measured = known
        self._lists: list[tf.Tensor] = []
        self._first = self._newest = self._places = 0
        self._alone: collections.deque[tuple[int, list]] = collections.deque(maxlen=_ALONE)

    def parts(self, batch: Any) -> list[tf.Tensor]:
        """The tensors of a batch."""
        return tf.nest.flatten(batch, expand_composites=True)

    def arrays(self, limit: tf.Tensor) -> list[tf.TensorArray]:
        """Empty lists in the graph of a call, one for each tensor of a batch.

        Args:
            limit: The most steps of the call, a scalar int32.
        """
        with tf.device("CPU:0"):
            return [tf.TensorArray(spec.dtype, size=limit, infer_shape=False) for spec in self._specs]

    def write(self, arrays: Sequence[tf.TensorArray], place: tf.Tensor, batch: Any) -> list[tf.TensorArray]:
        """The lists with the batch of one step at a place, a scalar int32."""
        with tf.device("CPU:0"):
            return [array.write(place, part) for array, part in zip(arrays, self.parts(batch), strict=True)]

    def forget(self) -> None:
        """Lets go of the batches of the last call of many steps, before another one takes the memory."""
        self._lists = []

    def took(self, lists: Sequence[tf.Tensor], newest: int, steps: int, places: int) -> None:
        """Remembers the batches of a call.

        Args:
            lists: The `flow` of each list.
            newest: The number of its last step.
            steps: How many steps it took.
            places: The places that its batches had in the lists.
        """
        self._alone.clear()
        self._lists, self._first, self._newest, self._places = list(lists), newest - steps + 1, newest, places
        if steps and not self._measured:
            self._measured = True
            self.most = _most([tf.TensorSpec(part.shape, part.dtype) for part in self._parts_at(0)])

    def saw(self, parts: Sequence[tf.Tensor], step: int) -> None:
        """Remembers the batch of a call that took one step."""
        self._alone.append((step, list(parts)))

    def holds(self, step: int) -> bool:
        """Whether the batch of a step is still held."""
        return self._in_lists(step) or any(number == step for number, _ in self._alone)

    def _in_lists(self, step: int) -> bool:
        first = max(self._first, self._newest - self._places + 1)
        return bool(self._lists) and first <= step <= self._newest

    def get(self, step: int) -> Any:
        """The batch of a step, or None if it is no longer held."""
        parts = next((parts for number, parts in self._alone if number == step), None)
        if parts is None and self._in_lists(step):
            parts = self._parts_at((step - self._first) % self._places)
        return None if parts is None else tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)

    def _parts_at(self, place: int) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            return [
                tf.raw_ops.TensorListGetItem(
                    input_handle=one, index=place, element_shape=tf.constant(-1), element_dtype=spec.dtype
                )
                for one, spec in zip(self._lists, self._specs, strict=True)
            ]


def _most(specs: Sequence[tf.TensorSpec]) -> int:
    size = sum(int(np.prod(spec.shape.as_list(), dtype=np.int64)) * max(spec.dtype.size or 1, 1) for spec in specs)
    return max(_ALONE, _BYTES // max(size, 1))
