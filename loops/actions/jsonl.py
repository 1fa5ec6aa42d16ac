"""One line of JSON for every step."""

from __future__ import annotations

import json
import math

from loops.actions.lines import StepLines
from loops.loop import Visit


class JsonLines(StepLines):
    """Writes each step as a line such as `{"step": 1, "loss": 2.3, "applied": true, "loss_scale": 32768.0}`.

    NaN and infinities, which JSON does not have, are written as null. An existing file is replaced when the first run
    begins; a further run of the same loop goes on in it. So does one that resumes from a checkpoint, after lines of
    steps that the checkpoint does not have were cut off. Lines are written at every visit, before a checkpoint is.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this; or, in `Seconds`, the last step of a visit so often.

    Raises:
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def _lines_of(self, visit: Visit) -> list[str]:
        columns = {name: values.tolist() for name, values in visit.outputs.items()}
        lines = []
        for row in self._cadence.rows(visit):
            line = {"step": visit.first + row}
            line.update({name: _plain(values[row]) for name, values in columns.items()})
            lines.append(json.dumps(line, allow_nan=False))
        return lines

    def _step_of(self, line: bytes) -> int | None:
        return json.loads(line)["step"]


def _plain(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
