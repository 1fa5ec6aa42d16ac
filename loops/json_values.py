"""Values that JSON can hold."""

from __future__ import annotations

import math
from typing import Any


def without_nan(value: Any) -> Any:
    """The same value, list or dict with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
