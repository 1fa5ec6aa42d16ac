"""Checks of integer arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaler


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is a Python or NumPy integer of at least `least`. True and False do not count."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_count(call: str, value: Any, least: int = 1) -> None:
    """Refuses anything but an integer of at least `least`.

    Args:
        call: What the user wrote, to begin the message with: "Profile(steps=0)".
        value: The value to check.
        least: The smallest integer that is allowed.

    Raises:
        scaler.InvalidArgument: If the value is refused.
    """
    if not is_count(value, least):
        raise scaler.InvalidArgument(f"{call}: expected an integer of at least {least}.")
