"""Checks of arguments, in one wording."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaler


def check(call: str, good: object, expected: str) -> None:
    """Refuses an argument unless it is good.

    Args:
        call: What the user wrote, to begin the message with: "Best(mode='least')".
        good: Whether it is.
        expected: The end of the message.

    Raises:
        scaler.InvalidArgument: If it is not.
    """
    if not good:
        raise scaler.InvalidArgument(f"{call}: expected {expected}.")


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
    check(call, is_count(value, least), f"an integer of at least {least}")
