"""A file that grows by whole pieces."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib


class Appended:
    """A file that is open at its end, without a buffer: a kill finds a piece in it, or in the one call that writes it.

    Args:
        path: The file; missing folders are created.
        end: How many of its bytes to keep; None for all of them.

    Raises:
        OSError: If it cannot be written.
    """

    def __init__(self, path: pathlib.Path, end: int | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Wherever the process goes, it is this file.
        self._path = path.absolute()
        self._file = path.open("wb" if end == 0 else "ab", buffering=0)
        if end:
            self._file.truncate(end)

    def add(self, piece: bytes) -> None:
        """Adds bytes at the end; where not all of them can be written, none are.

        Raises:
            OSError: If they cannot be written, and if the file is not at its path any more: they would be lost.
        """
        found = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(found, self._path.stat()):
                self._write(piece, found.st_size)
                return
        raise FileNotFoundError(errno.ENOENT, "it was removed or replaced while the run wrote it")

    def close(self) -> None:
        """Closes it."""
        self._file.close()

    def _write(self, piece: bytes, end: int) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # A device has no length.
                self._file.truncate(end)
                self._file.seek(end)
            raise
