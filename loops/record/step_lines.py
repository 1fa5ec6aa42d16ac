"""What a run wrote of its steps, and whether steps that were taken again agree with it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loops.support.json_values import row_of, without_nan

COMPARED = ("loss", "loss_scale", "applied")
"""The outputs in which a step that is taken again must be as it was."""


def read_log(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """The lines of a `JsonLines` file, in the order of their steps; none where there is no file.

    A line that is no object with a whole number as its "step", such as one that a kill tore, is passed over. Where a
    step stands in the file twice, its last line counts.
    """
    if path is None or not path.is_file():
        return []
    rows = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if row := row_of(line):
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


class Difference(NamedTuple):
    """In what two runs differ.

    Attributes:
        sentence: Without a full stop.
        known: False where there was nothing to compare with.
    """

    sentence: str
    known: bool = True


def difference(rows: Sequence[Mapping], replayed: Mapping[int, Mapping[str, np.ndarray]]) -> Difference | None:
    """In what steps that were taken again differ from the log: the first one, with both values; None if in nothing.

    Args:
        rows: The log.
        replayed: What each step returned, as scalars, by its number.
    """
    logged = {row["step"]: row for row in rows}
    compared = 0
    for step in sorted(replayed):
        for name in COMPARED:
            if name not in logged.get(step, ()) or name not in replayed[step]:
                continue
            then, now = logged[step][name], without_nan(replayed[step][name].tolist())
            compared += 1
            if then != now:
                return Difference(
                    f"{name} of step {step} was {_spelled(then)} in the run's log, and is {_spelled(now)} here"
                )
    if compared:
        return None
    if not rows:
        return Difference("there is no log of the run to compare with (a loops.JsonLines writes one)", known=False)
    which = f"{min(replayed)} to {max(replayed)}"
    return Difference(f"the run's log has nothing of the steps {which} to compare with", known=False)


def _spelled(value: Any) -> str:
    return "not finite" if value is None else json.dumps(value)
