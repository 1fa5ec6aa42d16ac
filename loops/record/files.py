"""The files of a run's folder: their names, and JSON that is whole or absent."""

from __future__ import annotations

import json
import pathlib

from loops.support.json_values import without_nan
from loops.support.written.place import writing

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of a run."""
STEPS, SUMMARY, TRACE = "steps.jsonl", "summary.json", "trace.arrow"
"""Its other files."""


def to_json(value: dict) -> str:
    """The value as JSON, with null for NaN and infinities, which JSON does not have."""
    return json.dumps(without_nan(value), indent=2, allow_nan=False)


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes JSON under a temporary name and renames it, so that a file is whole or absent.

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
