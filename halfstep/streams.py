"""Handles standard output whose reader is gone."""

from __future__ import annotations

import contextlib
import os
import select
import sys


def flush() -> None:
    """Flushes standard output while an error can still be reported."""
    if sys.stdout:
        sys.stdout.flush()


def reader_is_gone() -> bool:
    """Whether standard output or standard error is a pipe whose reader is gone."""
    poll = select.poll()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            poll.register(stream.fileno(), select.POLLERR)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def give_up() -> None:
    """Discards output that cannot be written: otherwise Python would try again at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
