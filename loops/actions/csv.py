"""One line of comma-separated values for every step."""

from __future__ import annotations

import csv
import io

from loops.actions.every import Cadence, Seconds
from loops.actions.lines import StepLines
from loops.errors import BadOutputs, LoopError
from loops.loop import Visit


class Csv:
    """Writes a header, then each step as a line: its number and the train step's outputs, in the order of their names.

    NaN and infinities are written as `nan`, `inf` and `-inf`, which NumPy and pandas read; bools as 1 and 0. An
    existing file is replaced or gone on with as by `JsonLines`.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this; or, in `Seconds`, the last step of a visit so often.

    Raises:
        OSError: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, path, *, every: int | Seconds = 1):
        self._lines = StepLines(path, _step_of)
        self._cadence = Cadence("Csv", every)

    def save_state(self) -> int:
        """The last step written, for a `Checkpoint`."""
        return self._lines.step

    def load_state(self, value: int) -> None:
        """Has the next run go on after step `value`."""
        self._lines.keep_to(value)

    def __enter__(self) -> Csv:
        self._lines.open()
        return self

    def __exit__(self, *exception) -> None:
        self._lines.close()

    def __call__(self, visit: Visit) -> None:
        """Writes the steps of a visit.

        Raises:
            BadOutputs: If the train step returns an output named "step".
            LoopError: If the file that is gone on with has other columns.
        """
        if not self._lines.is_open:
            raise RuntimeError("Csv is written by Loop.run; outside of it, use it in a with statement.")
        if "step" in visit.outputs:
            raise BadOutputs("the train step returns an output named 'step', which Csv uses for its number: rename it.")
        names = sorted(visit.outputs)
        header = _row(["step", *names])
        lines = [header] if self._lines.is_empty else []
        if not lines:
            with self._lines.path.open(encoding="utf-8", newline="") as file:
                found = file.readline().rstrip("\n")
            if found != header:
                raise LoopError(
                    f"{self._lines.path}: its columns are {found}, and this run's {header}. Choose another file."
                )
        columns = [visit.outputs[name].tolist() for name in names]
        for row in self._cadence.rows(visit):
            lines.append(_row([visit.first + row, *(_plain(column[row]) for column in columns)]))
        self._lines.write(lines, visit.counters.data)


def _row(values: list) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _plain(value):
    return int(value) if isinstance(value, bool) else value


def _step_of(line: bytes) -> int | None:
    first = line.partition(b",")[0]
    return int(first) if first.isdigit() else None
