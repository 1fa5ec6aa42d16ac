"""Checks that a message of a trace is well formed. Its checksum catches accidents, but stops no attacker.

How much memory a message takes once it is unpacked is known before anything is allocated.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

import scaler
from loops.record.steps import DECISIONS, NUMBERS
from loops.record.trace.messages import arrow

MOST = 2**30
"""The bytes that the batches of any trace may take once they are unpacked."""
_RATIO = 100
"""What they may take beyond it, as a multiple of the file's size; zeros and ones alone are packed to a twentieth."""
_LISTS = ("tensor", "bin", "count")


def schema_in(message: Any) -> Any:
    """The schema in a message, or None if it is none."""
    pa = arrow()
    try:
        return pa.ipc.read_schema(message)
    except (pa.ArrowException, OSError):
        return None


class Batches:
    """Reads the batches of one file.

    Args:
        schema: A `pyarrow.Schema`.
        tensors: The number of measured tensors, or None if that is unknown: then the values are not looked at.
        size: Of the file, in bytes.
        gauges: The number of measured gauges.
    """

    def __init__(self, schema: Any, tensors: int | None, size: int, gauges: int = 0):
        self._schema, self._tensors, self._gauges = schema, tensors, gauges
        self._room = MOST + _RATIO * size

    def read(self, message: Any) -> Any:
        """The `pyarrow.RecordBatch` in a message, or None if it is damaged, or too large."""
        pa = arrow()
        try:
            self._room -= unpacked_size(message)
            if self._room < 0:
                return None
            batch = pa.ipc.read_record_batch(message, self._schema)
            # Reading follows the offsets of lists and texts, and trusts them.
            batch.validate(full=True)
        except (pa.ArrowException, OSError, struct.error):
            return None
        if self._tensors is None:
            return batch
        return batch if _fits(batch, self._tensors) and (not self._gauges or _is_wide(batch, self._gauges)) else None


def has_columns(schema: Any) -> bool:
    """Whether a schema has all columns of a trace, with their types."""
    pa = arrow()
    types = {"kind": pa.string(), "step": pa.int64(), "cause": pa.string(), "amax": pa.list_(pa.float32())}
    types |= {name: pa.float64() for name in NUMBERS} | {name: pa.bool_() for name in DECISIONS}
    types |= dict(zip(_LISTS, (pa.list_(pa.int32()), pa.list_(pa.int16()), pa.list_(pa.int64())), strict=True))
    try:
        names = schema.names
    except UnicodeDecodeError:
        return False
    return all(names.count(name) == 1 and schema.field(name).type == kind for name, kind in types.items())


def _fits(batch: Any, tensors: int) -> bool:
    """Whether the values are those of so many tensors, as whoever makes arrays of them takes for granted."""
    columns = [batch.column(name) for name in ("amax", *_LISTS)]
    if batch.column("kind").null_count or batch.column("step").null_count or not all(map(_is_plain, columns)):
        return False
    amax, tensor, place, count = columns
    alike = all(np.array_equal(_lengths(tensor), _lengths(other)) for other in (place, count))
    return (
        alike
        and _all_of(amax, tensors)
        and _within(tensor, tensors)
        and _within(place, scaler.observe.BINS)
        and _within(count, np.iinfo(np.int64).max)
    )


def _is_wide(batch: Any, gauges: int) -> bool:
    """Whether each step that was measured has so many gauges."""
    column = batch.column("gauges")
    return _is_plain(column) and _all_of(column, gauges)


def _all_of(column: Any, width: int) -> bool:
    return bool((_lengths(column)[~np.asarray(column.is_null())] == width).all())


def _is_plain(column: Any) -> bool:
    """Whether no value in the lists is null, and no list that is null has values all the same."""
    lengths = _lengths(column)
    return column.flatten().null_count == 0 and not lengths[np.asarray(column.is_null())].any()


def _lengths(column: Any) -> np.ndarray:
    return np.diff(column.offsets.to_numpy())


def _within(column: Any, end: int) -> bool:
    values = column.flatten().to_numpy()
    return bool(((values >= 0) & (values < end)).all())


def unpacked_size(message: Any) -> int:
    """The bytes that the buffers of a batch say they take once they are unpacked: pyarrow allocates as many.

    They are in the message's flatbuffer, which pyarrow has verified, and before each packed buffer.
    """
    data, body = memoryview(message.metadata), memoryview(message.body)
    batch = _Table(data, _follow(data, 0)).table(2)
    if batch is None or batch.place(3) is None:
        return 0  # Nothing is packed: all of it lies in the file.
    vector = batch.place(2)
    if vector is None:
        return 0
    start = _follow(data, vector)
    found = 0
    for number in range(struct.unpack_from("<I", data, start)[0]):
        offset, length = struct.unpack_from("<qq", data, start + 4 + 16 * number)
        # A length of -1 says that the buffer is as it is.
        size = max(struct.unpack_from("<q", body, offset)[0], 0) if length >= 8 and offset >= 0 else 0
        found += size
    return found


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: memoryview, start: int):
        self._data, self._start = data, start
        self._fields = start - struct.unpack_from("<i", data, start)[0]

    def place(self, field: int) -> int | None:
        """Where a field lies, or None if the table does not have it."""
        slot = 4 + 2 * field
        if slot >= struct.unpack_from("<H", self._data, self._fields)[0]:
            return None
        offset = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return self._start + offset if offset else None

    def table(self, field: int) -> _Table | None:
        """The table that a field leads to."""
        place = self.place(field)
        return None if place is None else _Table(self._data, _follow(self._data, place))


def _follow(data: memoryview, place: int) -> int:
    return place + struct.unpack_from("<I", data, place)[0]
