"""The evaluations of a run's checkpoints: a line of JSON for each, in a file of their own beside the run's log."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from loops.record.files import EVALUATIONS
from loops.record.log import read_log
from loops.record.run import Gauges
from loops.support.json_values import as_float

STEP, MARK = "step", "checkpoint"
"""The names in a row that are no metrics: the step, and a hash of the checkpoint."""


def metrics_of(row: Mapping) -> dict[str, float]:
    """The metrics of a row. JSON has no NaN: it is null there."""
    return {name: as_float(value) for name, value in row.items() if name not in (STEP, MARK)}


def evaluations_in(folder: pathlib.Path) -> Gauges | None:
    """The evaluations of a run, NaN where a step lacks a metric; None without any."""
    rows = read_log(folder / EVALUATIONS)
    found = [metrics_of(row) for row in rows]
    names = tuple(dict.fromkeys(name for metrics in found for name in metrics))
    if not names:
        return None
    values = np.array([[metrics.get(name, np.nan) for name in names] for metrics in found], np.float64)
    return Gauges(np.array([row[STEP] for row in rows], np.int64), names, values)
