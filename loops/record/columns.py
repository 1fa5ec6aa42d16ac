"""The columns of a step, in a log and in a trace."""

from __future__ import annotations

from typing import Any

import scaler

NUMBERS = ("loss", "loss_scale", "grad_norm", "clipped_norm", "critical_low", "critical_high", "headroom")
"""Those that hold a number."""
DECISIONS = ("attempted", "applied")
"""Those that hold true or false."""


def cause_name(value: Any) -> str:
    """The name of a `scaler.Cause`; "" where none is known.

    Args:
        value: Of the column `cause`: the name, or the number that `Csv` and programs of one's own write.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return scaler.Cause(value).name if value and value in list(scaler.Cause) else ""
    return value if isinstance(value, str) else ""
