"""The last batches that a loop took, held by reference, for whoever repeats a step right after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loops.loop.batch_files import writable

_BYTES = 2**27
"""The most memory for the batches of one call."""
_UNKNOWN = 16
"""How many batches of unknown size are held of a call until one has been seen."""


class HeldBatches:
    """The last batches of the newest call, and of calls before it where that took too few steps.

    Of a call of many steps they are as many as fit into 128 MiB. Nothing is copied: the host, or a list in the graph,
    refers to the tensors that the dataset gave.

    Args:
        element_spec: The dataset's.
        least: How many of the newest batches are held in any case.

    Attributes:
        possible: Whether batches can be held: not those with a dataset inside.
        most: How many batches of the next call are held.
    """

    def __init__(self, element_spec: Any, least: int = 2):
        self.possible = writable(element_spec)
        self._spec = element_spec
        self._specs = tf.nest.flatten(element_spec, expand_composites=True)
        self._least = least
        self._measured = self.possible and all(spec.shape.is_fully_defined() for spec in self._specs)
        self.most = self._room_for(self._specs) if self._measured else max(_UNKNOWN, self._least)
        self._calls: list[_Call] = []

    def parts(self, batch: Any) -> list[tf.Tensor]:
        """The tensors of a batch."""
        return tf.nest.flatten(batch, expand_composites=True)

    def arrays(self, limit: tf.Tensor) -> list[tf.TensorArray]:
        """An empty list of batches in the graph of a call, which costs its loop less than one for each of their parts.

        Args:
            limit: The most steps of the call, a scalar int32.
        """
        with tf.device("CPU:0"):
            return [tf.TensorArray(tf.variant, size=limit, element_shape=[])]

    def write(self, arrays: Sequence[tf.TensorArray], place: tf.Tensor, batch: Any) -> list[tf.TensorArray]:
        """The list with the batch of one step at a place, a scalar int32."""
        with tf.device("CPU:0"):
            whole = tf.raw_ops.OptionalFromValue(components=self.parts(batch))
            return [array.write(place, whole) for array in arrays]

    def make_room(self, limit: int) -> None:
        """Lets go of batches that a call of so many steps makes superfluous, before it takes the memory for its own."""
        while self._calls and sum(one.steps for one in self._calls[1:]) + limit >= self._least:
            self._calls.pop(0)

    def took(self, whole: Sequence[tf.Tensor], newest: int, steps: int, places: int) -> None:
        """Remembers the batches of a call in the graph.

        Args:
            whole: The `flow` of its list.
            newest: The number of its last step.
            steps: How many steps it took.
            places: The number of places in the list that its batches took in turn.
        """
        if not steps:
            return
        self._calls.append(_Call(newest, steps, places, whole=whole[0]))
        if not self._measured:
            self._measured = True
            self.most = self._room_for([tf.TensorSpec(one.shape, one.dtype) for one in self._parts_of(newest) or ()])

    def saw(self, parts: Sequence[tf.Tensor], step: int) -> None:
        """Remembers the batch of a call that took one step."""
        self.make_room(1)
        self._calls.append(_Call(step, 1, 1, parts=list(parts)))

    def saw_all(self, batches: Sequence[Any], newest: int) -> None:
        """Remembers the batches of a call that took them from the host, as many of the last as there is room for.

        Args:
            batches: One or more, as arrays.
            newest: The number of the last one's step.
        """
        if not self._measured:
            self._measured = True
            self.most = self._room_for([tf.TensorSpec(one.shape, one.dtype) for one in self.parts(batches[-1])])
        self.make_room(len(batches))
        first = newest - len(batches) + 1
        taken = list(enumerate(batches, first))[-self.most :]
        self._calls += [_Call(step, 1, 1, parts=self.parts(batch)) for step, batch in taken]

    def holds(self, step: int) -> bool:
        """Whether the batch of a step is still held."""
        return any(one.has(step) for one in self._calls)

    def get(self, step: int) -> Any:
        """The batch of a step, or None if it is no longer held."""
        parts = self._parts_of(step)
        return None if parts is None else tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)

    def _parts_of(self, step: int) -> list[tf.Tensor] | None:
        call = next((one for one in self._calls if one.has(step)), None)
        if call is None or call.parts is not None:
            return call and [tf.convert_to_tensor(part) for part in call.parts or ()]
        place = (step - call.first) % call.places
        with tf.device("CPU:0"):
            whole = tf.raw_ops.TensorListGetItem(
                input_handle=call.whole,
                index=place,
                element_shape=tf.constant([], tf.int32),
                element_dtype=tf.variant,
            )
            return tf.raw_ops.OptionalGetValue(
                optional=whole,
                output_types=[spec.dtype for spec in self._specs],
                output_shapes=[spec.shape for spec in self._specs],
            )

    def _room_for(self, specs: Sequence[tf.TensorSpec]) -> int:
        size = sum(int(np.prod(spec.shape.as_list(), dtype=np.int64)) * max(spec.dtype.size or 1, 1) for spec in specs)
        return max(self._least, _BYTES // max(size, 1))


class _Call(NamedTuple):
    newest: int
    steps: int
    places: int
    whole: tf.Tensor | None = None
    parts: list[tf.Tensor] | None = None

    @property
    def first(self) -> int:
        return self.newest - self.steps + 1

    def has(self, step: int) -> bool:
        return max(self.first, self.newest - self.places + 1) <= step <= self.newest
