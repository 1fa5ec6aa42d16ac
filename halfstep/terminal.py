"""What several commands show while they work."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
import rich.table
import tensorflow as tf

from loops.actions import Progress

_BAR = 20
"""Columns of a bar, which leave room for what is done."""


class Console(rich.console.Console):
    """A console that leaves a closed pipe to the command, which has a status for it."""

    def on_broken_pipe(self) -> None:
        """Goes on with the error."""
        raise


def progress(label: str) -> Progress:
    """The line that says how far a run is."""
    return Progress(label, console=Console(stderr=True))


def width() -> int | None:
    """The columns that COLUMNS or the terminal has; None where there is no limit, as in a pipe or a file."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit():
        return int(columns) or None
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def folded(text: str, indent: str = "") -> str:
    """A text in lines that the terminal has room for; in one line elsewhere."""
    room = width()
    if room is None:
        return f"{indent}{text}"
    return textwrap.fill(text, room, initial_indent=indent, subsequent_indent=indent)


def quiet() -> None:
    """Keeps TensorFlow from warning of a step that is traced again and again, as an autopsy does it."""
    tf.get_logger().setLevel("ERROR")


@contextlib.contextmanager
def working(label: str, moving: bool = True) -> Iterator[Callable[[str], object]]:
    """A bar on a terminal's standard error while something is done that nobody knows the length of; nothing elsewhere.

    Args:
        label: Stands before the bar.
        moving: Whether it moves in between. A still bar takes no time from what is timed.

    Returns:
        A function that shows what is done now.
    """
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: None
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
