"""A file with one line per step, as JSON or as comma-separated values, which stays readable after a kill.

The evaluations of a run have lines of JSON in files of their own beside it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from loops.actions.evaluate import Evaluate
from loops.loop.visit import Cadence, Seconds, Visit
from loops.record.files import EVALUATIONS
from loops.record.log import read_log
from loops.record.steps import Gauges
from loops.record.trace.visit_columns import skip_names
from loops.support.errors import BadOutputs, LoopError, ResumeWarning
from loops.support.json_values import as_float, row_of, without_nan
from loops.support.written import AppendFile, Place, as_path, writing

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class StepLines:
    """Writes the lines of a visit in one piece. When a run resumes, removes the lines after its checkpoint.

    The results of the loop's `Evaluate` actions go into a file beside it: `steps.evaluations.jsonl` for `steps.jsonl`.

    A subclass formats the lines, and finds the step of a line.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this number; with `Seconds`, the last step of each visit that is
            due.

    Raises:
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, path: str | os.PathLike, *, every: int | Seconds = 1):
        self.path = as_path(type(self).__name__, "path", path)
        self.writes = Place(self.path, "file")
        self._cadence = Cadence(type(self).__name__, every)
        self._step = self._line = 0
        self._goes_on = False
        self._file: AppendFile | None = None
        self._loop: Loop | None = None
        self._evaluations: EvaluationLines | None = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: remembers the loop, and finds its evaluations."""
        self._loop = loop
        if self.path.is_file() or not self.path.exists():  # A device or a pipe has no place beside it.
            self._evaluations = EvaluationLines(self.path, loop)

    def save_state(self) -> dict[str, int]:
        """The last step of the run and the step of the last line, for a `Checkpoint`."""
        return {"step": self._step, "line": self._line}

    def load_state(self, value: dict[str, int]) -> None:
        """Makes the next run continue the file after a step, and warns of missing lines.

        Args:
            value: From `save_state`.
        """
        self._step, self._line = value["step"], value["line"]
        found = self._cut()
        if found < self._line:
            warnings.warn(
                f"{self.path}: its lines end at step {found}, but the run had written them up to step {self._line}: "
                "the file continues without the lines in between.",
                ResumeWarning,
                stacklevel=2,
            )

    def load_no_state(self, step: int) -> None:
        """Has the next run go on after a step whose checkpoint knows nothing of the file, and warns of that.

        The run was saved without this action, or with another path.
        """
        self._step = step
        self._line = found = self._cut()
        lines = f"the lines up to step {found} are kept" if found else "it has no line of a step before"
        warnings.warn(
            f"{self.path}: the checkpoint of step {step} was saved without it: {lines}, and the file goes on with "
            f"step {step + 1}.",
            ResumeWarning,
            stacklevel=2,
        )

    def _cut(self) -> int:
        """Keeps the file's lines up to the last step of the run, and returns the step of the last of them."""
        self._goes_on = True
        if not self.path.exists():
            return 0
        with self.path.open("rb+") as file:
            end, found = self._whole(file)
            file.truncate(end)
        return found

    def __enter__(self) -> StepLines:
        with writing(type(self).__name__, self.path):
            self._file = AppendFile(self.path, None if self._goes_on else 0)
        self._goes_on = True
        # Not in `begin`: a Checkpoint's `begin` may run later, and sets how many steps were taken.
        if self._evaluations and self._loop:
            self._evaluations.go_on(self._loop.counters.data)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file:
            self._file.close()
            self._file = None
        if self._evaluations:
            self._evaluations.add()  # Of an Evaluate that acts after this one.

    def __call__(self, visit: Visit) -> None:
        """Writes the steps of a visit.

        Raises:
            BadOutputs: If the train step returns an output named "step".
            LoopError: If the file that the run continues has other columns.
        """
        name = type(self).__name__
        if self._file is None:
            raise RuntimeError(f"{name} is written by Loop.run; outside of it, use it in a with statement.")
        if "step" in visit.outputs:
            raise BadOutputs(
                f"the train step returns an output named 'step', which {name} uses for the step's number: rename it."
            )
        lines = [f"{line}\n".encode() for line in self._lines_of(visit)]
        self._file.add(b"".join(lines))
        self._step = visit.counters.data
        if lines:
            self._line = self._step_of(lines[-1]) or self._line
        if self._evaluations:
            self._evaluations.add()

    def _lines_of(self, visit: Visit) -> list[str]:
        """The lines to add for a visit, without line ends."""
        raise NotImplementedError

    def _step_of(self, line: bytes) -> int | None:
        """The step of a line, or None if it has none, like a header."""
        raise NotImplementedError

    def _whole(self, file: IO[bytes]) -> tuple[int, int]:
        """The length in bytes of the lines up to the saved step, and the last line's step. Incomplete lines are out."""
        end = last = 0
        for line in file:
            step = self._step_of(line)
            if not line.endswith(b"\n") or (step is not None and step > self._step):
                break
            end, last = end + len(line), last if step is None else step
        return end, last


class JsonLines(StepLines):
    """Writes each step as a line such as `{"step": 1, "loss": 2.3, "applied": true, "loss_scale": 32768.0}`.

    For a `TrainStep`, `cause` is the name of a `scaler.Cause`, such as "OVERFLOW", and `variable` the path of a
    variable; both are null if the step was not skipped. `Csv` writes their numbers.

    NaN and infinities, which JSON does not have, are written as null. An existing file is replaced when the first run
    begins; a further run of the same loop continues it. So does a run that resumes from a checkpoint, after removing
    the lines of later steps. Lines are written at every visit, before a checkpoint is saved. The results of the loop's
    `Evaluate` actions go into a file beside it: `steps.evaluations.jsonl` for `steps.jsonl`.

    Args:
        path: The file. Missing folders are created.
        every: Write the steps that are multiples of this number; with `Seconds`, the last step of each visit that is
            due.

    Raises:
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def _lines_of(self, visit: Visit) -> list[str]:
        columns = {name: values.tolist() for name, values in visit.outputs.items()}
        columns |= skip_names(visit, self._loop.train_step if self._loop else None)
        lines = []
        for row in self._cadence.rows(visit):
            line = {"step": visit.first + row, **{name: values[row] for name, values in columns.items()}}
            lines.append(json.dumps(without_nan(line), allow_nan=False))
        return lines

    def _step_of(self, line: bytes) -> int | None:
        row = row_of(line)
        return row["step"] if row else None


class Csv(StepLines):
    """Writes a header, then one line per step: its number and the train step's outputs, in the order of their names.

    NaN and infinities are written as `nan`, `inf` and `-inf`, which NumPy and pandas read; bools as 1 and 0. An
    existing file is replaced or continued, as by `JsonLines`. So is the file of `Evaluate` results.

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


STEP, MARK = "step", "checkpoint"
"""The names in a row that are no metrics: the step, and a hash of the checkpoint."""


class EvaluationLines:
    """The results of a loop's `Evaluate` actions, in a file beside its log, such as `steps.evaluations.jsonl`.

    The file is replaced at each new result, so that a kill leaves it complete.

    Args:
        log: The log.
        loop: The loop.
    """

    def __init__(self, log: pathlib.Path, loop: Loop):
        self._path = beside(log.absolute())
        found = [action for action in loop.actions if isinstance(action, Evaluate)]
        names = [one.name for one in found]
        before = [names[:place].count(name) for place, name in enumerate(names)]
        self._evaluations = {
            one: f"{one.name} {number + 1}" if number else one.name for one, number in zip(found, before, strict=True)
        }
        self._rows: dict[int, dict[str, Any]] = {}
        self._of_another_run: dict[Evaluate, dict[str, float]] = {}

    def go_on(self, step: int) -> None:
        """Keeps the lines up to this step, and removes the file if there are none.

        Raises:
            NotWritable: If the file cannot be written or removed.
        """
        self._rows = {row[STEP]: row for row in read_log(self._path) if row[STEP] <= step}
        self._of_another_run = {one: one.results for one in self._evaluations if one.step > step}
        if self._rows:
            self._write()
        else:
            with writing("Evaluate", self._path):
                self._path.unlink(missing_ok=True)

    def add(self) -> None:
        """Adds the newest results that the file lacks.

        Raises:
            NotWritable: If the file cannot be written.
        """
        is_new = False
        for one, label in self._evaluations.items():
            if one.step and one.results is not self._of_another_run.get(one):
                row = self._rows.setdefault(one.step, {STEP: one.step})
                found = {f"{label}/{name}": value for name, value in one.results.items()}
                is_new |= not found.keys() <= row.keys()
                row.update(found)
        if is_new:
            self._write()

    def _write(self) -> None:
        text = "".join(f"{json.dumps(without_nan(self._rows[step]), allow_nan=False)}\n" for step in sorted(self._rows))
        temporary = self._path.with_suffix(".tmp")
        with writing("Evaluate", self._path):
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)


def beside(log: pathlib.Path) -> pathlib.Path:
    """The file of the `Evaluate` results that belongs to a log."""
    return log.with_name(f"{log.stem}.{EVALUATIONS}")


def metrics_of(row: Mapping) -> dict[str, float]:
    """The metrics of a row. JSON has no NaN: it is null there."""
    return {name: as_float(value) for name, value in row.items() if name not in (STEP, MARK)}


def evaluations_in(folder: pathlib.Path, log: pathlib.Path | None = None) -> Gauges | None:
    """The evaluations of a run, NaN where a step lacks a metric; None without any."""
    found: dict[int, dict[str, float]] = {}
    for row in [*(read_log(beside(log)) if log else []), *read_log(folder / EVALUATIONS)]:
        found.setdefault(row[STEP], {}).update(metrics_of(row))
    names = tuple(dict.fromkeys(name for metrics in found.values() for name in metrics))
    if not names:
        return None
    steps = sorted(found)
    values = np.array([[found[step].get(name, np.nan) for name in names] for step in steps], np.float64)
    return Gauges(np.array(steps, np.int64), names, values)
