"""Reads a log of steps from `JsonLines` or `Csv`, as columns or as rows; tolerates incomplete lines."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loops.record.steps import DECISIONS, NO_STEPS, NUMBERS, RETRIES, Steps, cause_name
from loops.support.json_values import as_float, is_row, read_json, row_of, without_nan
from loops.support.part_names import columns_of, part_names

_COLUMNS = (*NUMBERS, *DECISIONS, RETRIES)
_CHUNK = 10_000
"""Lines that are parsed at a time: a million dicts at once take a gigabyte."""
_DIGITS = 18
"""The most digits of a number that surely fits into 64 bits."""


@dataclasses.dataclass(frozen=True, eq=False)
class Log(Steps):
    """The steps of a log, and what of it could not be read.

    Attributes:
        unread: The number of lines that were skipped.
        text: What is wrong with columns that are left out, since they hold text: one clause each.
        first_unread: The number of the first of the lines that were skipped, from 1; 0 without one.
        with_text: The columns that are left out, NaN where a step has text.
    """

    unread: int = 0
    text: tuple[str, ...] = ()
    first_unread: int = 0
    with_text: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def damage(self, name: str, text_is: str) -> list[str]:
        """What of the file could not be read, as sentences that name the lines.

        Args:
            name: Of the file.
            text_is: What becomes of text where a number has to be, such as "the column is left out".
        """
        said = []
        if self.unread == 1:
            said = [f"{name}: 1 incomplete or foreign line was skipped, line {self.first_unread}."]
        elif self.unread:
            said = [f"{name}: {self.unread} incomplete or foreign lines were skipped, first line {self.first_unread}."]
        end = f"{text_is}. Write numbers, and null for NaN and infinities."
        return said + [f"{name}: {clause}: {end}" for clause in self.text]


def read_columns(path: pathlib.Path) -> Log:
    """The columns of a log: a CSV file if its name ends in ".csv", else JSON lines.

    Incomplete lines are skipped. If a step is there twice, its last line counts.
    """
    return columns_in(_lines(path), comma=path.suffix == ".csv")


def columns_in(lines: Sequence[str], *, comma: bool) -> Log:
    """The columns of some lines of a log.

    Args:
        lines: The lines, without line ends.
        comma: Whether they are comma-separated values with a header as the first line.
    """
    parts: list[Steps] = []
    unread: list[int] = []
    text: dict[str, str] = {}
    number = 1 + (comma and bool(lines))
    for rows in _of_csv(lines) if comma else _of_json(lines):
        parts.append(part := _table([row for row in rows if row]))
        unread += [at for at, row in enumerate(rows, number) if not row]
        for name in part.columns.keys() - text.keys():
            texts = ((at, row[name]) for at, row in enumerate(rows, number) if row and isinstance(row.get(name), str))
            if first := next(texts, None):
                text[name] = f"line {first[0]} has the text {first[1]!r:.60} as its {name}, not a number"
        number += len(rows)
    found = _last_of_each(parts)
    # A number for the text would be a guess, and a missing one would be told as a loss that is not finite.
    columns = {name: values for name, values in found.columns.items() if name not in text}
    with_text = {name: values for name, values in found.columns.items() if name in text}
    told = tuple(text[name] for name in with_text)
    return Log(found.step, columns, found.cause, len(unread), told, min(unread, default=0), with_text)


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _of_json(lines: Sequence[str]) -> Iterator[list[dict | None]]:
    """The row in each line, None where there is none: of some lines at a time."""
    for start in range(0, len(lines), _CHUNK):
        chunk = lines[start : start + _CHUNK]
        try:
            rows = read_json(f"[{','.join(chunk)}]")
            if len(rows) != len(chunk):
                raise ValueError("a line holds several values")
        except ValueError:
            rows = [row_of(line) for line in chunk]
        yield [row if is_row(row) else None for row in rows]


def _of_csv(lines: Sequence[str]) -> Iterator[list[dict | None]]:
    """The same of comma-separated values, without their header."""
    header = _cells(lines[0]) if lines else []
    rows: list[dict | None] = []
    for line in lines[1:]:
        cells = dict(zip(header, cells, strict=False)) if len(cells := _cells(line)) >= len(header) else {}
        # An incomplete last line may end within a number.
        step = cells.get("step", "")
        whole = step.isdecimal() and len(step) <= _DIGITS
        rows.append({**{name: _number(value) for name, value in cells.items()}, "step": int(step)} if whole else None)
    yield rows


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _number(text: str) -> float | str | None:
    """A number, None of an empty cell, or the text if it is neither."""
    try:
        return float(text)
    except ValueError:
        return text or None


def _table(rows: Sequence[dict]) -> Steps:
    names = [name for name in (*_COLUMNS, *_of_parts(rows)) if any(name in row for row in rows)]
    columns = {name: np.array([as_float(row.get(name)) for row in rows], np.float64) for name in names}
    step = np.array([row["step"] for row in rows], np.int64)
    return Steps(step, columns, np.array([cause_name(row.get("cause")) for row in rows], np.str_))


def _of_parts(rows: Sequence[dict]) -> list[str]:
    """The same columns of the parts of a composed step, such as "critic/loss"."""
    names = dict.fromkeys(name for row in (*rows[:1], *rows[-1:]) for name in row)
    return [name for part in part_names(names) for name in (f"{part}/{one}" for one in _COLUMNS) if name in names]


def _last_of_each(parts: Iterable[Steps]) -> Steps:
    """One table of the parts of a log, in the order of the steps. Of a step that is there twice the last row counts."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return NO_STEPS
    # In the order of the log, for reports that are the same each time.
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: np.concatenate([part.column(name) for part in parts]) for name in names}
    step, cause = (np.concatenate([getattr(part, name) for part in parts]) for name in ("step", "cause"))
    # `unique` finds the first, so the order is reversed.
    _, back = np.unique(step[::-1], return_index=True)
    return Steps(step, columns, cause).where(len(step) - 1 - back)


def _with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The row with numbers or null in the columns of numbers, for whoever computes with them; text is left out."""
    row = {name: value for name, value in row.items() if name not in _COLUMNS or not isinstance(value, str)}
    for name in _COLUMNS:
        value = row.get(name)
        if value is not None and not isinstance(value, float) and not (isinstance(value, int) and abs(value) < 2**63):
            row[name] = without_nan(as_float(value))
    return row


COMPARED = ("loss", "loss_scale", "applied")
"""The outputs that must be equal when a step is repeated, of the step and of each of its parts."""


def read_log(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """The lines of a `JsonLines` file, in the order of their steps; empty if there is no file.

    Incomplete lines, and those without an integer "step", are skipped. If a step is there twice, its last line counts.
    """
    if path is None or not path.is_file():
        return []
    rows = {row["step"]: _with_numbers(row) for line in _lines(path) if (row := row_of(line))}
    return [rows[step] for step in sorted(rows)]


class Difference(NamedTuple):
    """How a repeated step differs from the log.

    Attributes:
        sentence: The difference, without a full stop.
        known: False if the log has nothing to compare with.
    """

    sentence: str
    known: bool = True


def difference(rows: Sequence[Mapping], replayed: Mapping[int, Mapping[str, np.ndarray]]) -> Difference | None:
    """The first difference between repeated steps and the log, with both values; None if there is none.

    Args:
        rows: The log.
        replayed: The scalar outputs of each repeated step, by its number.
    """
    logged = {row["step"]: row for row in rows}
    compared = 0
    for step in sorted(replayed):
        for name in _compared(replayed[step]):
            if name not in logged.get(step, ()):
                continue
            then, now = logged[step][name], without_nan(replayed[step][name].tolist())
            compared += 1
            if then != now:
                part, _, column = name.rpartition("/")
                which = f"{column} of {part} at step {step}" if part else f"{name} of step {step}"
                return Difference(f"{which} was {_spelled(then)} in the run's log, but is {_spelled(now)} here")
    if compared:
        return None
    if not rows:
        return Difference("there is no log of the run to compare with (hs.JsonLines writes one)", known=False)
    which = f"{min(replayed)} to {max(replayed)}"
    return Difference(f"the run's log does not have the steps {which} to compare with", known=False)


def _compared(names: Iterable[str]) -> list[str]:
    """What is compared of some outputs, also of each part of a composed step, such as "critic/loss"."""
    return [name for one in COMPARED for name in columns_of(names, one).values()]


def _spelled(value: Any) -> str:
    return "not finite" if value is None else json.dumps(value)
