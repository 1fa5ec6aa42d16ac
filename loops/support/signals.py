"""Defers Ctrl-C and SIGTERM until the end of a call."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

EXIT_INTERRUPTED = 130
"""Status of a process after SIGINT: 128 + 2, as in a shell."""
EXIT_TERMINATED = 143
"""Status of a process after SIGTERM: 128 + 15."""


class Deferred:
    """Signals that were received and not yet acted on.

    Attributes:
        received: Their numbers.
    """

    def __init__(self, handlers: Mapping[int, Any]):
        self.received: list[int] = []
        self._handlers = handlers

    def act(self) -> None:
        """Acts on them.

        SIGINT raises KeyboardInterrupt. SIGTERM calls its previous handler, or raises SystemExit(143) if it had none.
        """
        if signal.SIGINT in self.received:
            raise KeyboardInterrupt
        if signal.SIGTERM in self.received:
            self.received.remove(signal.SIGTERM)
            handler = self._handlers.get(signal.SIGTERM)
            if not callable(handler):
                raise SystemExit(EXIT_TERMINATED)
            handler(signal.SIGTERM, None)


@contextlib.contextmanager
def deferred_signals() -> Iterator[Deferred]:
    """Defers SIGINT and SIGTERM until `Deferred.act` is called.

    A second signal of the same kind is not deferred. An ignored signal stays ignored. Outside of the main thread, where
    Python has no signal handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Deferred({})
        return
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deferred = Deferred(before)

    def receive(number: int, frame: types.FrameType | None) -> None:
        if number in deferred.received:
            signal.signal(number, before[number])
            signal.raise_signal(number)
            return
        deferred.received.append(number)

    deferrable = [number for number, handler in before.items() if _is_deferrable(number, handler)]
    for number in deferrable:
        signal.signal(number, receive)
    try:
        yield deferred
    finally:
        for number in deferrable:
            signal.signal(number, before[number])


def _is_deferrable(number: int, handler: Any) -> bool:
    # SIG_DFL ends the process at once: for SIGINT somebody has set that, for SIGTERM it is the default.
    return callable(handler) or (number == signal.SIGTERM and handler == signal.SIG_DFL)
