"""A file that is appended to in complete pieces."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib


class AppendFile:
    """A file opened for appending without a buffer: each piece is written in one system call.

    Args:
        path: The file. Missing folders are created.
        end: The number of bytes to keep; None for all of them.

    Raises:
        OSError: If it cannot be written.
    """

    def __init__(self, path: pathlib.Path, end: int | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Absolute, because the process may change its folder.
        self._path = path.absolute()
        self._file = path.open("wb" if end == 0 else "ab", buffering=0)
        if end:
            self._file.truncate(end)

    def add(self, piece: bytes) -> None:
        """Appends bytes: all of them, or none if they cannot be written.

        Raises:
            OSError: If they cannot be written, or if the file is no longer at its path, so that they would be lost.
        """
        found = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(found, self._path.stat()):
                self._write(piece, found.st_size)
                return
        raise FileNotFoundError(errno.ENOENT, "it was removed or replaced while the run wrote it")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, piece: bytes, end: int) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # A device cannot be truncated.
                self._file.truncate(end)
                self._file.seek(end)
            raise
