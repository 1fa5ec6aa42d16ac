"""Ctrl-C and SIGTERM that wait for the end of a call."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

EXIT_INTERRUPTED = 130
"""Status of a process after SIGINT: 128 + 2, as shells say it."""
EXIT_TERMINATED = 143
"""Status of a process after SIGTERM: 128 + 15."""


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Keeps SIGINT and SIGTERM from breaking off what is under way; the function it gives lets them act.

    SIGINT then raises KeyboardInterrupt, SIGTERM calls the handler it had, or raises SystemExit(143) if it had none. A
    second signal of the same kind is not kept. A signal that is ignored stays ignored. Outside of the main thread,
    where Python has no signal handlers, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, frame) -> None:
        if number in received:
            signal.signal(number, before[number])
            signal.raise_signal(number)
            return
        received.append(number)

    def act_if_received() -> None:
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        if signal.SIGTERM in received:
            received.remove(signal.SIGTERM)
            handler = before[signal.SIGTERM]
            if not callable(handler):
                raise SystemExit(EXIT_TERMINATED)
            handler(signal.SIGTERM, None)

    deferrable = [number for number, handler in before.items() if _is_deferrable(number, handler)]
    for number in deferrable:
        signal.signal(number, receive)
    try:
        yield act_if_received
    finally:
        for number in deferrable:
            signal.signal(number, before[number])


def _is_deferrable(number: int, handler) -> bool:
    # SIGINT without Python's handler was asked to end the process at once; for SIGTERM that is what nobody asked for.
    return callable(handler) or (number == signal.SIGTERM and handler == signal.SIG_DFL)
