"""Arrow IPC messages, each with a checksum of all of its bytes.

Arrow's format has no checksum: a flipped byte in a value is read as another value. So the custom metadata of each
message holds `crc32`, eight hexadecimal digits, computed over the whole message with eight zeros in their place.

The checksum catches accidents, but stops no attacker: a batch is checked to be well formed, too. How much memory it
takes once it is unpacked is known before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import scaler
from loops.support.errors import LoopError

KEY = "crc32"
_MARK = b"crc32="
_DIGITS = 8
BLANK = (_MARK + b"0" * _DIGITS).decode()
"""The value of `KEY` before a message is sealed."""
_PREFIX = 8
"""Bytes before a message's metadata: 0xFFFFFFFF, and the length of the metadata."""
MOST = 2**30
"""The bytes that the batches of any trace may take once they are unpacked."""
_RATIO = 100
"""What they may take beyond it, as a multiple of the file's size; zeros and ones alone are packed to a twentieth."""
_LISTS = ("tensor", "bin", "count")


def arrow() -> Any:
    """The module `pyarrow`, with `pyarrow.ipc` in it.

    Raises:
        LoopError: If it is not installed.
    """
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise LoopError('a trace needs pyarrow: pip install "halfstep[trace]"') from error
    return pyarrow


def sealed(message: bytes) -> bytes:
    """The message with its checksum in place of `BLANK`."""
    place = message.index(BLANK.encode()) + len(_MARK)
    return message[:place] + _digits(message) + message[place + _DIGITS :]


class Found(NamedTuple):
    """One intact message of a file.

    Attributes:
        message: A `pyarrow.ipc.Message`.
        end: The end of the message in the file, in bytes.
    """

    message: Any
    end: int


def whole_messages(data: bytes) -> Iterator[Found]:
    """The messages from the start up to the first one that is incomplete or has a wrong checksum."""
    pa = arrow()
    buffer, start = pa.py_buffer(data), 0
    while start < len(data):
        try:
            reader = pa.BufferReader(buffer.slice(start))
            message = pa.ipc.read_message(reader)
            end = start + reader.tell()
        except (pa.ArrowException, OSError, EOFError):
            return
        if not _is_sealed(data[start:end]):
            return
        yield Found(message, end)
        start = end


def _is_sealed(message: bytes) -> bool:
    # Metadata precedes the values, so bytes of a value that look like the mark are never found first.
    place = message.find(_MARK) + len(_MARK)
    if place < _PREFIX + len(_MARK):
        return False
    blank = message[:place] + b"0" * _DIGITS + message[place + _DIGITS :]
    return message[place : place + _DIGITS] == _digits(blank)


def _digits(message: bytes) -> bytes:
    return b"%08x" % zlib.crc32(message)


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
        size: Of the file, in bytes.
        tensors: The number of measured tensors, or None if that is unknown: then the values are not looked at.
        gauges: The number of measured gauges.
    """

    def __init__(self, schema: Any, size: int, tensors: int | None, gauges: int):
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
        return batch if self._tensors is None or _fits(batch, self._tensors, self._gauges) else None


def _fits(batch: Any, tensors: int, gauges: int) -> bool:
    """Whether the values are those of so many tensors and gauges, as whoever makes arrays of them takes for granted."""
    amax, tensor, place, count = (batch.column(name) for name in ("amax", *_LISTS))
    wide = [(amax, tensors), *([(batch.column("gauges"), gauges)] if gauges else [])]
    ends = [(tensor, tensors), (place, scaler.observe.BINS), (count, np.iinfo(np.int64).max)]
    return (
        not batch.column("kind").null_count
        and not batch.column("step").null_count
        and all(map(_is_plain, (tensor, place, count, *(column for column, _ in wide))))
        and all((_lengths(column)[~np.asarray(column.is_null())] == width).all() for column, width in wide)
        and all(np.array_equal(_lengths(tensor), _lengths(other)) for other in (place, count))
        and all(_within(column, end) for column, end in ends)
    )


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
    header = _field(data, _follow(data, 0), 2)
    if header is None or _field(data, batch := _follow(data, header), 3) is None:
        return 0  # Nothing is packed: all of it lies in the file.
    vector = _field(data, batch, 2)
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


def _field(data: memoryview, table: int, field: int) -> int | None:
    """Where a field of a table of a flatbuffer lies, or None if the table does not have it."""
    fields, slot = table - struct.unpack_from("<i", data, table)[0], 4 + 2 * field
    if slot >= struct.unpack_from("<H", data, fields)[0]:
        return None
    offset = struct.unpack_from("<H", data, fields + slot)[0]
    return table + offset if offset else None


def _follow(data: memoryview, place: int) -> int:
    return place + struct.unpack_from("<I", data, place)[0]
