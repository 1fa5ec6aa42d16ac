"""Reads what was appended to a file since the last read."""

from __future__ import annotations

import os
import pathlib

from loops.record.log import Log, columns_in
from loops.record.trace.file import contents
from loops.record.trace.messages import arrow, whole_messages
from loops.record.trace.stream import STEP, read_tensors
from loops.record.trace_columns import columns_of


class Tail:
    """Reads a file piece by piece, and again from the start if it was truncated or replaced.

    Args:
        path: The file, which may not exist yet.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._end = 0
        self._file = (0, 0)

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._end = 0

    def more(self) -> tuple[bytes, bool]:
        """The new bytes, and whether they begin at the start of the file. Only `take` advances the position."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                if found.st_size < self._end or identity != self._file:
                    self._end, self._file = 0, identity
                file.seek(self._end)
                return file.read(), self._end == 0
        except OSError:
            self._end = 0
            return b"", True

    def take(self, size: int) -> None:
        """Marks the next `size` bytes as read."""
        self._end += size


class LogTail:
    """The steps that were added to a log of lines."""

    def __init__(self, path: pathlib.Path):
        self._tail = Tail(path)
        self._comma = path.suffix == ".csv"
        self._header = b""

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._tail.rewind()

    def more(self) -> tuple[Log, bool]:
        """The new steps, and whether they begin at the start of the file. An incomplete line waits for its end."""
        data, from_start = self._tail.more()
        whole = data[: data.rfind(b"\n") + 1]
        self._tail.take(len(whole))
        if self._comma and from_start:
            self._header = whole[: whole.find(b"\n") + 1]
        elif self._comma:
            whole = self._header + whole
        return columns_in(whole.decode("utf-8", errors="replace").splitlines(), comma=self._comma), from_start


class TraceTail:
    """The steps that were added to a trace. An incomplete message waits for its end."""

    def __init__(self, path: pathlib.Path):
        self._tail = Tail(path)
        self._opening = b""

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._tail.rewind()

    def more(self) -> tuple[Log | None, bool]:
        """The new steps, None before the schema is complete, and whether they begin at the start of the file."""
        data, from_start = self._tail.more()
        if from_start:
            self._opening = b""
        found = contents(self._opening + data)
        if found.schema is None or read_tensors(found.schema) is None:
            return None, from_start
        self._tail.take(found.end - len(self._opening))
        self._opening = self._opening or data[: next(whole_messages(data)).end]
        pa = arrow()
        table = pa.Table.from_batches(found.batches, found.schema)
        steps = [kind == STEP for kind in table["kind"].to_pylist()]
        return columns_of(table.filter(pa.array(steps, pa.bool_()))), from_start
