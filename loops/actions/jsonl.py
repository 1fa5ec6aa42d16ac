"""One line of JSON for every step."""

from __future__ import annotations

import json
import math
import pathlib
from typing import IO

from loops.errors import BadOutputs
from loops.loop import Visit


class JsonLines:
    """Writes each step as a line such as `{"step": 1, "loss": 2.3, "applied": true, "loss_scale": 32768.0}`.

    NaN and infinities, which JSON does not have, are written as null. An existing file is replaced when the first run
    begins; a further run of the same loop goes on in it. So does one that resumes from a checkpoint, after lines of
    steps that the checkpoint does not have were cut off. Lines are flushed at every visit.

    Args:
        path: The file. Missing folders are created.

    Raises:
        OSError: When the run begins, if the file cannot be written.
    """

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._mode = "w"
        self._file: IO[str] | None = None
        self._step = 0

    def save_state(self) -> int:
        """The last step written, for a `Checkpoint`."""
        return self._step

    def load_state(self, value: int) -> None:
        """Has the next run go on after step `value`."""
        self._step, self._mode = value, "a"
        if self._path.exists():
            with self._path.open("rb+") as file:
                file.truncate(_end_of(file, value))

    def __enter__(self) -> JsonLines:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open(self._mode, encoding="utf-8")
        self._mode = "a"
        return self

    def __exit__(self, *exception) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def __call__(self, visit: Visit) -> None:
        """Writes the steps of a visit."""
        if self._file is None:
            raise RuntimeError("JsonLines is written by Loop.run; outside of it, use it in a with statement.")
        if "step" in visit.outputs:
            raise BadOutputs(
                "the train step returns an output named 'step', which JsonLines uses for its number: rename it."
            )
        columns = {name: values.tolist() for name, values in visit.outputs.items()}
        for offset, row in enumerate(zip(*columns.values(), strict=True)):
            line = {"step": visit.first + offset}
            line.update({name: _plain(value) for name, value in zip(columns, row, strict=True)})
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._step = visit.counters.data


def _end_of(file: IO[bytes], step: int) -> int:
    """Where the lines up to `step` end; a line that a kill tore is none."""
    end = 0
    for line in file:
        if not line.endswith(b"\n") or json.loads(line)["step"] > step:
            break
        end += len(line)
    return end


def _plain(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
