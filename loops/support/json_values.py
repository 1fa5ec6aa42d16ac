"""Values that JSON can hold, and text that may hold some."""

from __future__ import annotations

import json
import math
from typing import Any


def without_nan(value: Any) -> Any:
    """The same value, list or dict with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(text: str | bytes) -> Any:
    """The value of a text that anything may have damaged.

    Raises:
        ValueError: If it holds none, or one that is nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """The step of a line of a `JsonLines` file, or None for a line that is damaged or foreign."""
    try:
        found = read_json(line)
    except ValueError:
        return None
    return found if is_row(found) else None


def is_row(value: Any) -> bool:
    """Whether a value is a row of a step: an object with a whole number of 64 bits as its "step"."""
    return isinstance(value, dict) and type(value.get("step")) is int and abs(value["step"]) < 2**63
