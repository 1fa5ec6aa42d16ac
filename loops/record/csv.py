"""One line of comma-separated values for every step."""

from __future__ import annotations

import csv
import io

from loops.loop.visit import Visit
from loops.record.lines import StepLines
from loops.support.errors import LoopError


class Csv(StepLines):
    """Writes a header, then one line per step: its number and the train step's outputs, in the order of their names.

    NaN and infinities are written as `nan`, `inf` and `-inf`, which NumPy and pandas read; bools as 1 and 0. An
    existing file is replaced or continued, as by `JsonLines`.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this number; with `Seconds`, the last step of each visit that is
            due.

    Raises:
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def _lines_of(self, visit: Visit) -> list[str]:
        names = sorted(visit.outputs)
        header = _row(["step", *names])
        columns = [visit.outputs[name].tolist() for name in names]
        rows = [
            _row([visit.first + place, *(_number(column[place]) for column in columns)])
            for place in self._cadence.rows(visit)
        ]
        return rows if self._has(header) else [header, *rows]

    def _has(self, header: str) -> bool:
        if not self.path.is_file():
            return False  # A device may be read without end.
        with self.path.open(encoding="utf-8", newline="") as file:
            found = file.readline().rstrip("\n")
        if found and found != header:
            raise LoopError(f"{self.path}: its columns are {found}, but this run's are {header}. Choose another file.")
        return bool(found)

    def _step_of(self, line: bytes) -> int | None:
        first = line.partition(b",")[0]
        # A number beyond 64 bits is damage.
        return int(first) if first.isdigit() and len(first) < 19 else None


def _row(values: list) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _number(value: float | int | bool) -> float | int:
    return int(value) if isinstance(value, bool) else value
