"""How much memory a message of an Arrow stream takes once it is unpacked, known before anything is allocated."""

from __future__ import annotations

import struct
from typing import Any


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
