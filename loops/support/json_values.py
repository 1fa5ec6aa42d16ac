"""Writes and reads JSON that may have NaN, or be damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_DEEPEST = 100
"""Whoever walks through a value calls itself for each level, and Python's stack is not endless."""


def without_nan(value: Any) -> Any:
    """A copy of a value, list or dict with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(text: str | bytes) -> Any:
    """Parses text that may be damaged.

    Raises:
        ValueError: If it is not JSON, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_object(text: str | bytes) -> dict[str, Any]:
    """Parses an object that may be damaged, and in which no more than a hundred lists and objects lie in each other.

    Raises:
        ValueError: If it is something else.
    """
    found = read_json(text)
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        level = [part for value in level for part in _parts(value) if isinstance(part, (dict, list))]
        if not level:
            return found
    raise ValueError("it is nested too deep")


def _parts(value: dict | list) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def as_float(value: Any) -> float:
    """A number as a float, an infinity if it is too large for one; NaN for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """The row in a line of a `JsonLines` file, or None if the line is damaged or of another kind."""
    try:
        found = read_json(line)
    except ValueError:
        return None
    return found if is_row(found) else None


def is_row(value: Any) -> bool:
    """Whether a value is the row of a step: an object with a 64-bit integer "step"."""
    return isinstance(value, dict) and type(value.get("step")) is int and abs(value["step"]) < 2**63
