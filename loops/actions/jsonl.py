"""One line of JSON for every step."""

from __future__ import annotations

import json
import math

from loops.actions.every import Cadence, Seconds
from loops.actions.lines import StepLines
from loops.errors import BadOutputs
from loops.loop import Visit


class JsonLines:
    """Writes each step as a line such as `{"step": 1, "loss": 2.3, "applied": true, "loss_scale": 32768.0}`.

    NaN and infinities, which JSON does not have, are written as null. An existing file is replaced when the first run
    begins; a further run of the same loop goes on in it. So does one that resumes from a checkpoint, after lines of
    steps that the checkpoint does not have were cut off. Lines are written at every visit, before a checkpoint is.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this; or, in `Seconds`, the last step of a visit so often.

    Raises:
        OSError: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, path, *, every: int | Seconds = 1):
        self._lines = StepLines(path, lambda line: json.loads(line)["step"])
        self._cadence = Cadence("JsonLines", every)

    def save_state(self) -> int:
        """The last step written, for a `Checkpoint`."""
        return self._lines.step

    def load_state(self, value: int) -> None:
        """Has the next run go on after step `value`."""
        self._lines.keep_to(value)

    def __enter__(self) -> JsonLines:
        self._lines.open()
        return self

    def __exit__(self, *exception) -> None:
        self._lines.close()

    def __call__(self, visit: Visit) -> None:
        """Writes the steps of a visit."""
        if not self._lines.is_open:
            raise RuntimeError("JsonLines is written by Loop.run; outside of it, use it in a with statement.")
        if "step" in visit.outputs:
            raise BadOutputs(
                "the train step returns an output named 'step', which JsonLines uses for its number: rename it."
            )
        columns = {name: values.tolist() for name, values in visit.outputs.items()}
        lines = []
        for row in self._cadence.rows(visit):
            line = {"step": visit.first + row}
            line.update({name: _plain(values[row]) for name, values in columns.items()})
            lines.append(json.dumps(line, allow_nan=False))
        self._lines.write(lines, visit.counters.data)


def _plain(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
