"""A trace's file: a sequence of messages. A kill leaves at most the last one incomplete."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import warnings
from typing import Any, NamedTuple

from loops.record.trace.messages import Batches, schema_in, whole_messages
from loops.record.trace.stream import Described, described_in
from loops.support.errors import ResumeWarning
from loops.support.written import AppendFile


class Contents(NamedTuple):
    """The contents of a trace's file up to its end, or to the first damage.

    Attributes:
        schema: A `pyarrow.Schema`, or None if it is damaged.
        what: What it says of the trace, or None if it is not that of a trace of this version.
        batches: A `pyarrow.RecordBatch` for each visit.
        starts: The start of each of them, in bytes.
        end: The end of the last intact message, in bytes.
        size: The size of the file, in bytes.
    """

    schema: Any
    what: Described | None
    batches: list
    starts: list[int]
    end: int
    size: int

    @property
    def whole(self) -> bool:
        """Whether the complete file could be read."""
        return self.end == self.size


def contents(data: bytes) -> Contents:
    """Parses the bytes of a file."""
    schema, what, reader, batches, starts, end = None, None, None, [], [], 0
    for message, after in whole_messages(data):
        if message.type != ("schema" if reader is None else "record batch"):
            break
        if reader is None:
            schema = schema_in(message)
            if schema is None:
                break
            what = described_in(schema)
            sizes = (len(what.tensors), len(what.gauges)) if what else (None, 0)
            reader = Batches(schema, len(data), *sizes)
        else:
            batch = reader.read(message)
            if batch is None:
                break
            batches.append(batch)
            starts.append(end)
        end = after
    return Contents(schema, what, batches, starts, end, len(data))


class TraceFile:
    """Appends messages to a file, also to one that an earlier run has left.

    Args:
        path: The file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.end = 0
        self._file: AppendFile | None = None
        self._goes_on = False

    def keep(self, end: int) -> None:
        """Makes the next run continue after the first `end` bytes; with a `ResumeWarning` if some are missing."""
        self._goes_on = True
        # `read(end)` would take as much memory as a checkpoint says that the file is long.
        self.end = contents(self.path.read_bytes()[:end]).end if self.path.exists() else 0
        if self.end < end:
            self._set_aside(end)
        if self.path.exists():
            os.truncate(self.path, self.end)

    def keep_steps(self, step: int) -> int:
        """Has the next run go on after the pieces of steps up to one; a file that is damaged is copied before.

        Returns:
            The last step that is kept, 0 for none.
        """
        self._goes_on = True
        if not self.path.exists():
            return 0
        found = self.read()
        self.end = found.end
        if not found.whole:
            self._set_aside(found.size)
        lasts = [max(batch.column("step").to_pylist(), default=0) for batch in found.batches]
        later = next((place for place, last in enumerate(lasts) if last > step), None)
        if later is not None:
            self.end = found.starts[later]
        os.truncate(self.path, self.end)
        return max(lasts[:later], default=0)

    def open(self) -> None:
        """Opens the file, and empties it unless the run continues it."""
        for folder in self.path.parents:
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file, not a folder")
        self.end, self._goes_on = self.end if self._goes_on and self.path.exists() else 0, True
        self._file = AppendFile(self.path, self.end)

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()
            self._file = None

    @property
    def closed(self) -> bool:
        """Whether the file is not open."""
        return self._file is None

    def add(self, message: bytes) -> None:
        """Appends bytes: all of them, or none if they cannot be written."""
        assert self._file is not None
        self._file.add(message)
        self.end += len(message)

    def read(self) -> Contents:
        """The contents of the file."""
        return contents(self.path.read_bytes())

    def _set_aside(self, end: int) -> None:
        what = "is gone"
        if self.path.exists():
            aside = self.path.with_name(f"{self.path.name}.damaged")
            shutil.copyfile(self.path, aside)
            what = f"is damaged after {self.end} of {end} bytes, and was copied to {aside.name}"
        warnings.warn(
            f"{self.path} {what}: the trace continues without the lost steps.",
            ResumeWarning,
            stacklevel=4,
        )
