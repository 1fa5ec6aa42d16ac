"""The evaluations of a run: a line of JSON for each step, in files of their own beside the run's log."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from loops.actions.evaluate import Evaluate
from loops.record.files import EVALUATIONS
from loops.record.log import read_log
from loops.record.steps import Gauges
from loops.support.json_values import as_float, without_nan
from loops.support.written import writing

if TYPE_CHECKING:
    from loops.loop.loop import Loop

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
