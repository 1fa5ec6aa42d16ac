"""Arrow IPC messages, each with a checksum of all of its bytes.

Arrow's format has no checksum: a flipped byte in a value is read as another value. So the custom metadata of each
message holds `crc32`, eight hexadecimal digits, computed over the whole message with eight zeros in their place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from loops.support.errors import LoopError

KEY = "crc32"
_MARK = b"crc32="
_DIGITS = 8
BLANK = (_MARK + b"0" * _DIGITS).decode()
"""The value of `KEY` before a message is sealed."""
_PREFIX = 8
"""Bytes before a message's metadata: 0xFFFFFFFF, and the length of the metadata."""


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
