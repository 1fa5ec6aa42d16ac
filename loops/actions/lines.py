"""A file of lines, one for a step, that a kill leaves readable."""

from __future__ import annotations

import os
from typing import IO

from loops.actions.every import Cadence, Seconds
from loops.actions.places import as_path, writing
from loops.errors import BadOutputs
from loops.visit import Visit


class StepLines:
    """Writes the lines of a visit in one piece, and cuts off, when a run resumes, those that its checkpoint lacks.

    A child says what the lines are and which step a line is of.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this; or, in `Seconds`, the last step of a visit so often.

    Raises:
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, path: str | os.PathLike, *, every: int | Seconds = 1):
        self.path = as_path(type(self).__name__, "path", path)
        self._cadence = Cadence(type(self).__name__, every)
        self._step = 0
        self._mode = "wb"
        self._file: IO[bytes] | None = None

    def save_state(self) -> int:
        """The last step written, for a `Checkpoint`."""
        return self._step

    def load_state(self, value: int) -> None:
        """Has the next run go on after step `value`."""
        self._step, self._mode = value, "ab"
        if self.path.exists():
            with self.path.open("rb+") as file:
                file.truncate(self._end_of(file))

    def __enter__(self) -> StepLines:
        with writing(type(self).__name__, self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open(self._mode, buffering=0)
        self._mode = "ab"
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def __call__(self, visit: Visit) -> None:
        """Writes the steps of a visit.

        Raises:
            BadOutputs: If the train step returns an output named "step".
            LoopError: If the file that is gone on with has other columns.
        """
        name = type(self).__name__
        if self._file is None:
            raise RuntimeError(f"{name} is written by Loop.run; outside of it, use it in a with statement.")
        if "step" in visit.outputs:
            raise BadOutputs(
                f"the train step returns an output named 'step', which {name} uses for its number: rename it."
            )
        # Without a buffer a kill finds each line in the file, or in the one call that writes all of them.
        rest = "".join(f"{line}\n" for line in self._lines_of(visit)).encode()
        while rest:
            rest = rest[self._file.write(rest) :]
        self._step = visit.counters.data

    def _lines_of(self, visit: Visit) -> list[str]:
        """What to add for a visit, without the ends of lines."""
        raise NotImplementedError

    def _step_of(self, line: bytes) -> int | None:
        """The step of a line, or None if it is of no step, as a header is."""
        raise NotImplementedError

    def _end_of(self, file: IO[bytes]) -> int:
        """Where the lines up to the last step end; a line that a kill tore is none."""
        end = 0
        for line in file:
            if not line.endswith(b"\n") or ((step := self._step_of(line)) is not None and step > self._step):
                break
            end += len(line)
        return end
