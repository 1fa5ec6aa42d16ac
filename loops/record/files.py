"""The files of a run's folder: their names, how to find them, and how to write JSON atomically."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import scaler
from loops.support.errors import LoopError
from loops.support.json_values import read_object, without_nan
from loops.support.written import writing

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
STEPS, SUMMARY, TRACE = "steps.jsonl", "summary.json", "trace.arrow"
"""The other files: the log of steps, the summary at the end, and the trace."""
EVALUATIONS = "evaluations.jsonl"
"""What `evaluate_checkpoints` measured; beside a log, in a file of its own, what an `Evaluate` measured."""
EXPLANATIONS = "explanations.json"
"""What `Explain` found."""
STEPS_CSV = "steps.csv"
"""The log of a run that does not write `STEPS`."""
REPLAY = "replay.json"
"""The output of `halfstep lab replay --json`, if the user saved it."""


def check_run(run: str | os.PathLike, *, or_file: bool = False, hint: str = "") -> pathlib.Path:
    """The folder of a run.

    Args:
        run: A path from the user.
        or_file: Whether a file of the run is also accepted.
        hint: The end of the error message.

    Raises:
        scaler.InvalidArgument: If it does not exist.
    """
    place = pathlib.Path(run)
    if not (place.exists() if or_file else place.is_dir()):
        raise scaler.InvalidArgument(
            f"{run}: no such folder: expected a run's --out, or that of a program's actions{hint}."
        )
    return place


def trace_of(place: pathlib.Path) -> pathlib.Path | None:
    """The trace in a run's folder, or None.

    Raises:
        LoopError: If there are several, and none has the default name.
    """
    return _one(place, TRACE, "*.arrow")


def log_of(place: pathlib.Path) -> pathlib.Path | None:
    """The log of steps in a run's folder, or None.

    Raises:
        LoopError: If there are several, and none has the default name.
    """
    return _one(place, STEPS, "*.jsonl") or _one(place, STEPS_CSV, "*.csv")


def _one(folder: pathlib.Path, usual: str, pattern: str) -> pathlib.Path | None:
    if (folder / usual).is_file():
        return folder / usual
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.endswith(EVALUATIONS))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise LoopError(f"{folder}: which file is the run's: {names}? Name one of them instead of the folder.")
    return found[0] if found else None


def read_summary(folder: pathlib.Path) -> dict[str, Any] | None:
    """The summary that a run writes at its end; None if it does not exist or cannot be read."""
    try:
        return read_object((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def to_json(value: dict) -> str:
    """The value as JSON, with null for NaN and infinities, which JSON does not have."""
    return json.dumps(without_nan(value), indent=2, allow_nan=False)


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes JSON under a temporary name and renames it, so that the file is complete or absent.

    Raises:
        NotWritable: If it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with writing("the result", path):
            temporary.write_text(to_json(value) + "\n", encoding="utf-8")
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
