"""An action that is called, with its name in what the disk says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from loops.support.written.place import Place, writing


def place_of(action: object) -> Place | None:
    """What an action writes, where it says so."""
    found = getattr(action, "writes", None)
    return found if isinstance(found, Place) else None


@contextlib.contextmanager
def named(action: object, then: str = "") -> Iterator[None]:
    """Names an action that writes, and what it writes, where that fails.

    Args:
        action: Any; the errors of one that does not say what it writes are left as they are.
        then: A further sentence.

    Raises:
        NotWritable: In the place of an OSError or an OpError.
    """
    place = place_of(action)
    with writing(type(action).__name__, place.path, then) if place else contextlib.nullcontext():
        yield


def enter(stack: contextlib.ExitStack, action: contextlib.AbstractContextManager) -> None:
    """Enters an action, and has the stack leave it; what fails then is told unless an error came before it."""

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
