"""The last batches of a run: held by reference, or in a folder that the graph of its calls writes.

A file is one line and then the tensors of a batch in the order of `tf.nest.flatten`, each serialized by
`tf.io.serialize_tensor`. The line holds its own checksum, the number of the step, a digest of the dataset's
element_spec, and the length and the checksum of each tensor. A new file replaces the oldest one.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.support.errors import NotWritable
from loops.support.written import reason

_SCOPE = "kept_batches"
_NAME = "batch-"
_LONGEST_LINE = 2**16


@scaler.authoring.no_autograph
def write(folder: pathlib.Path, batch: Any, step: tf.Tensor, *, last: int, element_spec: Any) -> tf.Operation:
    """Adds an operation to a graph that writes a batch, on the CPU and without Python.

    Args:
        folder: An absolute path.
        batch: An element of the dataset.
        step: The number of the step that takes it, an int64 scalar.
        last: The maximum number of files.
        element_spec: The dataset's.

    Returns:
        The operation that writes.
    """
    with tf.device("CPU:0"), tf.name_scope(_SCOPE):
        # A part of a batch may be None, which has no tensor and no spec.
        flat = [part for part in tf.nest.flatten(batch, expand_composites=True) if part is not None]
        parts = [tf.io.serialize_tensor(part) for part in flat]
        known = [text for part in parts for text in (_text(tf.strings.length(part)), _checksum(part))]
        line = tf.strings.join([_text(step), _digest(element_spec), *known], " ")
        path = tf.strings.join([f"{folder}/{_NAME}", _text(step % last)])
        # Each part has its checksum: one over the joined parts would need a second copy of them.
        return tf.io.write_file(path, tf.strings.join([_checksum(line), " ", line, "\n", *parts]))


def writable(element_spec: Any) -> bool:
    """Whether all parts of such batches are tensors that can be serialized, and none is a dataset or a resource."""
    parts = tf.nest.flatten(element_spec, expand_composites=True)
    return all(isinstance(part, tf.TensorSpec) and part.dtype not in (tf.variant, tf.resource) for part in parts)


def write_error(error: tf.errors.OpError) -> NotWritable | None:
    """The error to raise for a batch that could not be written; None if TensorFlow's error has another cause."""
    if f"{_SCOPE}/" not in error.message:
        return None
    return NotWritable(
        f"KeepBatches: a batch could not be written ({reason(error)}). Its step was not taken. Make room, or keep "
        "fewer batches, with KeepBatches(last=)."
    )


class KeptBatches:
    """The batches in a folder, by the number of their step.

    Args:
        folder: Where they were written; it may be missing.
        element_spec: That of the dataset they came from.
    """

    def __init__(self, folder: pathlib.Path, element_spec: Any):
        self._spec = element_spec
        self._paths = {step: path for path in _files(folder) if (step := _step_of(path)) is not None}

    def has(self, after: int, until: int) -> bool:
        """Whether the folder has the batches of all steps from `after` + 1 to `until`, damaged or not."""
        return all(step in self._paths for step in range(after + 1, until + 1))

    def get(self, step: int) -> Any:
        """The batch of a step, or None if it is missing, damaged, or of another dataset."""
        try:
            content = self._paths[step].read_bytes()
        except (KeyError, OSError):
            return None
        try:
            return self._parsed(content, step)
        except (ValueError, tf.errors.OpError):  # The checksums match, but the bytes are no batch.
            return None

    def _parsed(self, content: bytes, step: int) -> Any:
        line, _, rest = content.partition(b"\n")
        fields = _fields(line)
        if fields is None or int(fields[0]) != step or fields[1] != _digest(self._spec):
            return None
        parts = []
        specs = tf.nest.flatten(self._spec, expand_composites=True)
        for length, checksum, spec in zip(fields[2::2], fields[3::2], specs, strict=True):
            part, rest = rest[: int(length)], rest[int(length) :]
            if _checksum(part).numpy().decode() != checksum:
                return None
            parts.append(tf.ensure_shape(tf.io.parse_tensor(part, spec.dtype), spec.shape))
        return tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)


def sweep(folder: pathlib.Path, newest: int) -> None:
    """Removes damaged files, and the batches of steps after `newest`, which the run repeats or never took.

    Raises:
        OSError: If a file cannot be removed.
    """
    for path in _files(folder):
        step = _step_of(path)
        if step is None or step > newest:
            path.unlink()


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(
        path for path in folder.glob(f"{_NAME}*") if path.name.removeprefix(_NAME).isdecimal() and path.is_file()
    )


def _step_of(path: pathlib.Path) -> int | None:
    """The step in a file's line; None if the line is damaged or cannot be read."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_LINE)
    except OSError:
        return None
    fields = _fields(line.removesuffix(b"\n"))
    return int(fields[0]) if fields and re.fullmatch(r"\d{1,18}", fields[0]) else None


def _fields(line: bytes) -> list[str] | None:
    """The fields of a line after its checksum; None if the checksum does not match."""
    checksum, _, text = line.partition(b" ")
    return text.decode("ascii", "replace").split() if text and _checksum(text).numpy() == checksum else None


def _digest(element_spec: Any) -> str:
    return hashlib.sha256(str(element_spec).encode()).hexdigest()[:16]


def _checksum(text: tf.Tensor | bytes) -> tf.Tensor:
    return _text(tf.strings.to_hash_bucket_fast(text, 2**63 - 1))


def _text(number: tf.Tensor) -> tf.Tensor:
    return tf.strings.as_string(number)


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

    def saw(self, batches: Sequence[Any], newest: int) -> None:
        """Remembers the batches of a call that took them from the host, as many of the last as there is room for.

        Args:
            batches: One or more, as tensors or arrays.
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
