"""The last batches of a run in a folder: written in the graph of its calls, and read back one by one.

A file is one line and then the tensors of a batch in the order of `tf.nest.flatten`, each serialized by
`tf.io.serialize_tensor`. The line holds its own checksum, the number of the step, a digest of the dataset's
element_spec, and the length and the checksum of each tensor. A new file replaces the oldest one.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from typing import Any

import tensorflow as tf

import scaler
from loops.support.errors import NotWritable
from loops.support.written.place import reason

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
