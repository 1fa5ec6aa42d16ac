"""Ctrl-C that waits for the end of a call."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Keeps SIGINT from breaking off what is under way; the function it gives raises it where nothing is.

    A second SIGINT is not kept. Outside of the main thread, where Python has no signal handlers, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def receive(number: int, frame) -> None:
        if received or not callable(previous):
            signal.signal(signal.SIGINT, previous)
            signal.raise_signal(number)
            return
        received.append(number)

    def raise_if_received() -> None:
        if received:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, receive)
    try:
        yield raise_if_received
    finally:
        signal.signal(signal.SIGINT, previous)
