"""One line of JSON for every step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from loops.loop.visit import Visit
from loops.record.lines import StepLines
from loops.record.skip_names import skip_names
from loops.support.json_values import row_of, without_nan

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class JsonLines(StepLines):
    """Writes each step as a line such as `{"step": 1, "loss": 2.3, "applied": true, "loss_scale": 32768.0}`.

    For a `TrainStep`, `cause` is the name of a `scaler.Cause`, such as "OVERFLOW", and `variable` the path of a
    variable; both are null if the step was not skipped. `Csv` writes their numbers.

    NaN and infinities, which JSON does not have, are written as null. An existing file is replaced when the first run
    begins; a further run of the same loop continues it. So does a run that resumes from a checkpoint, after removing
    the lines of later steps. Lines are written at every visit, before a checkpoint is saved.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this number; with `Seconds`, the last step of each visit that is
            due.

    Raises:
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    _train_step: Any = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: remembers the loop's train step."""
        self._train_step = loop.train_step

    def _lines_of(self, visit: Visit) -> list[str]:
        columns = {name: values.tolist() for name, values in visit.outputs.items()}
        columns |= skip_names(visit, self._train_step)
        lines = []
        for row in self._cadence.rows(visit):
            line = {"step": visit.first + row, **{name: values[row] for name, values in columns.items()}}
            lines.append(json.dumps(without_nan(line), allow_nan=False))
        return lines

    def _step_of(self, line: bytes) -> int | None:
        row = row_of(line)
        return row["step"] if row else None
