"""Checks of numbers that several parts of the loops take."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaler


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is an integer of at least `least`, of Python or NumPy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_count(said: str, value: Any, least: int = 1) -> None:
    """Refuses anything else.

    Args:
        said: What the user wrote, to begin the sentence with: "Profile(steps=0)".
        value: Any.
        least: The smallest integer that is allowed.

    Raises:
        scaler.InvalidArgument: With `said` and what is allowed.
    """
    if not is_count(value, least):
        raise scaler.InvalidArgument(f"{said}: expected an integer of at least {least}.")
