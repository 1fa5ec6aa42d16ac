"""Follows a run until it ends or the watcher stops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import rich.console
import rich.live

from loops.record.files import check_run
from loops.views.watch.progress import LiveRun
from loops.views.watch.screen import line, panel

_POLL = 0.5
"""Seconds between two reads."""
_LINE = 10.0
"""Seconds between two lines of output without a terminal."""


def watch(
    run: str | os.PathLike, console: rich.console.Console | None = None, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Shows a run that another process trains, until its summary says that it has ended, or for ever.

    It reads the log and the trace that the run appends to, and writes nothing. On a terminal it redraws a few lines;
    elsewhere it prints a line every ten seconds, and one at the end.

    Args:
        run: The folder of the run, which may still be empty.
        console: The console to write to (default: standard output).
        sleep: Waits for a number of seconds.

    Raises:
        scaler.InvalidArgument: If there is no such folder.
        LoopError: If the folder holds several logs or traces and none has the usual name.
    """
    place = check_run(run, hint=", once the run was started")
    console = console or rich.console.Console()
    course = LiveRun(place)
    if console.is_terminal and not console.is_dumb_terminal:
        _redraw(course, place.resolve().name, console, sleep)
    else:
        _print(course, console, sleep)


def _redraw(course: LiveRun, name: str, console: rich.console.Console, sleep: Callable[[float], object]) -> None:
    blocks = "utf" in (console.encoding or "").lower()
    with rich.live.Live(console=console, auto_refresh=False) as live:
        while True:
            course.look()
            live.update(panel(course, name, console.width, blocks=blocks), refresh=True)
            if course.summary is not None:
                return
            sleep(_POLL)


def _print(course: LiveRun, console: rich.console.Console, sleep: Callable[[float], object]) -> None:
    said, waited = "", _LINE
    while True:
        course.look()
        text = line(course)
        over = course.summary is not None
        if over or (waited >= _LINE and text != said):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            said, waited = text, 0.0
        if over:
            return
        sleep(_POLL)
        waited += _POLL
