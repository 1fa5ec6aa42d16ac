"""Progress displays and text folding for the commands."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
import rich.progress
import rich.table
import tensorflow as tf

from loops.actions import Progress

_BAR = 20
"""Columns of a bar; the rest of the line is for the status."""
_EVERY = 10.0
"""Seconds between the lines where there is no bar, as for `Progress`."""


class Console(rich.console.Console):
    """A console that passes a closed pipe on to the command, which has an exit status for it.

    It redraws on a terminal alone: FORCE_COLOR, which notebooks and CI set, makes no terminal of a pipe.
    """

    def __init__(self, **options: Any):
        stream = options.get("file") or (sys.stderr if options.get("stderr") else sys.stdout)
        options.setdefault("force_terminal", stream.isatty())
        super().__init__(**options)

    def on_broken_pipe(self) -> None:
        """Raises the error again."""
        raise


def progress(label: str) -> Progress:
    """A line that shows how far a run is."""
    return Progress(label, console=Console(stderr=True))


def width() -> int | None:
    """The width from COLUMNS or the terminal; None if there is no limit, as in a pipe or a file."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit():
        return int(columns) or None
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def folded(text: str, indent: str = "") -> str:
    """A text wrapped to the terminal's width; one line if there is no terminal."""
    room = width()
    if room is None:
        return f"{indent}{text}"
    return textwrap.fill(text, room, initial_indent=indent, subsequent_indent=indent)


def quiet() -> None:
    """Silences TensorFlow's warning about repeated tracing, which an autopsy causes."""
    tf.get_logger().setLevel("ERROR")


@contextlib.contextmanager
def working(label: str, moving: bool = True) -> Iterator[Callable[[str], object]]:
    """Shows a bar without a known end on standard error, or a line now and then if that is no terminal.

    Args:
        label: The text before the bar.
        moving: Whether the bar is redrawn between updates. A still bar does not disturb timings.

    Returns:
        A function that shows its text as the current status.
    """
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        last = time.monotonic()

        def tell(text: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _EVERY:
                last = now
                console.print(f"{label}  {text}", markup=False, highlight=False, soft_wrap=True)

        yield tell
        return
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(bar_width=_BAR),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[status]}", markup=False, table_column=rich.table.Column(no_wrap=True)),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, auto_refresh=moving) as bar:
        task = bar.add_task(label, total=None, status="")
        yield lambda text: bar.update(task, status=text, refresh=not moving)
