"""A line that says how far the run is."""

from __future__ import annotations

import time

import rich.console
import rich.progress

from loops.loop import Visit


class Progress:
    """Shows steps, loss, loss scale, skipped steps and speed: a moving bar on a terminal, else a plain line at times.

    Args:
        label: Stands at the start of the line.
        seconds_between_lines: Where the output is not a terminal, the least time between two lines.
        console: A `rich.console.Console`; standard error if not given.
    """

    def __init__(
        self,
        label: str = "train",
        *,
        seconds_between_lines: float = 10.0,
        console: rich.console.Console | None = None,
    ):
        self._label = label
        self._console = console or rich.console.Console(stderr=True)
        self._between = seconds_between_lines
        self._last_line = float("-inf")
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Progress:
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("{task.fields[status]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self._label, total=None, status="compiling")
            self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def __call__(self, visit: Visit) -> None:
        """Brings the line up to date."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=visit.counters.data, total=visit.goal, status=_status(visit))
        elif visit.counters.data >= visit.goal or time.monotonic() - self._last_line >= self._between:
            self._last_line = time.monotonic()
            line = f"{self._label}  {visit.counters.data}/{visit.goal}  {_status(visit)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _status(visit: Visit) -> str:
    parts = []
    if "loss" in visit.outputs:
        parts.append(f"loss {visit.outputs['loss'][-1]:.4g}")
    if "loss_scale" in visit.outputs:
        parts.append(f"scale {visit.outputs['loss_scale'][-1]:g}")
    parts.append(f"skipped {visit.counters.skipped}")
    return "  ".join(parts)
