"""Calls actions so that errors of writing name the action and its file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from loops.support.written.place import Place, writing


def place_of(action: object) -> Place | None:
    """What an action writes, from its attribute `writes`; None without it."""
    found = getattr(action, "writes", None)
    return found if isinstance(found, Place) else None


@contextlib.contextmanager
def named(action: object, then: str = "") -> Iterator[None]:
    """Adds the names of an action and of its file to errors of writing in the body.

    Args:
        action: The action. Errors are unchanged if it has no attribute `writes`.
        then: A further sentence for the message.

    Raises:
        NotWritable: In place of an OSError or an OpError.
    """
    place = place_of(action)
    with writing(type(action).__name__, place.path, then) if place else contextlib.nullcontext():
        yield


def enter(stack: contextlib.ExitStack, action: contextlib.AbstractContextManager) -> None:
    """Enters an action, and registers its exit with the stack. An error of the exit does not hide an earlier one."""

    def leave(kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        try:
            with named(action):
                return action.__exit__(kind, error, trace)
        except OSError:
            if error is None:
                raise
            return None

    with named(action):
        action.__enter__()
    stack.push(leave)
