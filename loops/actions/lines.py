"""A file of lines, one for a step, that a kill leaves readable."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import IO


class StepLines:
    """Writes the lines of a visit in one piece, and cuts off, when a run resumes, those that its checkpoint lacks.

    Args:
        path: The file. Missing folders are created when it is opened.
        step_of: The step of a line, or None if it is of no step, as a header is.
    """

    def __init__(self, path, step_of: Callable[[bytes], int | None]):
        self.path = pathlib.Path(path)
        self.step = 0
        self._step_of = step_of
        self._mode = "wb"
        self._file: IO[bytes] | None = None

    def keep_to(self, step: int) -> None:
        """Has the file go on after `step`."""
        self.step, self._mode = step, "ab"
        if self.path.exists():
            with self.path.open("rb+") as file:
                file.truncate(self._end_of(file))

    def open(self) -> None:
        """Opens the file: a new one, unless it is to go on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open(self._mode, buffering=0)
        self._mode = "ab"

    def close(self) -> None:
        """Closes it."""
        if self._file:
            self._file.close()
            self._file = None

    @property
    def is_open(self) -> bool:
        """Whether it can be written."""
        return self._file is not None

    @property
    def is_empty(self) -> bool:
        """Whether it has no line."""
        return self.path.stat().st_size == 0

    def write(self, lines: list[str], step: int) -> None:
        """Adds lines without their ends, up to that of `step`."""
        assert self._file is not None
        rest = "".join(f"{line}\n" for line in lines).encode()
        # Without a buffer a kill finds each line in the file, or in the one call that writes all of them.
        while rest:
            rest = rest[self._file.write(rest) :]
        self.step = step

    def _end_of(self, file: IO[bytes]) -> int:
        """Where the lines up to `step` end; a line that a kill tore is none."""
        end = 0
        for line in file:
            if not line.endswith(b"\n") or ((step := self._step_of(line)) is not None and step > self.step):
                break
            end += len(line)
        return end
