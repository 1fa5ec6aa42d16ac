"""Small real problems that ship with the package."""

from __future__ import annotations

import scaler
from loops.tasks import digits, mnist
from loops.tasks.images import ImageTask as ImageTask

_TASKS = {"digits": digits.load, "mnist": mnist.load}


def load(name: str) -> ImageTask:
    """A task by name.

    Args:
        name: "digits" or "mnist".

    Raises:
        scaler.InvalidArgument: For another name.
        loops.LoopError: If its data cannot be had; the message says why.
    """
    if name not in _TASKS:
        raise scaler.InvalidArgument(f"task {name!r}: expected one of {', '.join(_TASKS)}.")
    return _TASKS[name]()
