"""Small real problems that ship with the package."""

from __future__ import annotations

from collections.abc import Callable

import scaler
from loops.tasks import images, text
from loops.tasks.images import ImageTask as ImageTask
from loops.tasks.text import TextTask as TextTask

Task = ImageTask | TextTask
IMAGE_TASKS = ("digits", "mnist")
"""The tasks that are `ImageTask`s, as studies need them."""
_TASKS: dict[str, Callable[[], Task]] = {"digits": images.digits, "mnist": images.mnist, "text": text.load}


def load(name: str) -> Task:
    """A task by name.

    Args:
        name: "digits", "mnist" or "text".

    Raises:
        scaler.InvalidArgument: For another name.
        loops.LoopError: If its data is not available; the message says why.
    """
    if name not in _TASKS:
        raise scaler.InvalidArgument(f"task {name!r}: expected one of {', '.join(_TASKS)}.")
    return _TASKS[name]()
