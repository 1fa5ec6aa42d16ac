"""What becomes of output that nobody reads."""

from __future__ import annotations

import contextlib
import os
import select
import sys


def flush() -> None:
    """Writes what standard output still holds, while an error can be told."""
    if sys.stdout:
        sys.stdout.flush()


def nobody_reads() -> bool:
    """Whether standard output or standard error is a pipe whose reader is gone."""
    poll = select.poll()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            poll.register(stream.fileno(), select.POLLERR)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def give_up() -> None:
    """Drops what standard output and standard error cannot take, which Python would try again when it ends."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
