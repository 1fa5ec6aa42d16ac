"""A progress bar or line."""

from __future__ import annotations

import datetime
import pathlib
from typing import TYPE_CHECKING

import rich.console
import rich.progress
import rich.table

from loops.actions.evaluate import Evaluate
from loops.loop.visit import Cadence, Seconds, Visit
from loops.support.errors import check
from loops.support.part_names import in_turn, named
from loops.support.written import Place

if TYPE_CHECKING:
    from loops.loop.loop import Loop
    from loops.loop.state.compared import Resumed

_BAR = 20
"""Width of the bar in columns, which leaves room for the numbers next to it."""


class Progress:
    """Shows step, applied and skipped steps, loss scale, loss, speed, time left, and the loop's `Evaluate` results.

    On a terminal it is a moving bar, elsewhere a plain line from time to time and at the end. Speed and time left are
    measured from the first visit of a run, to leave out compilation. A run says once what its `Loop` chose that makes
    a call longer; one that goes on from a checkpoint, from which step and with what changes; and one that has no step
    to take, that there is none.

    Args:
        label: The start of the line.
        every: Steps or `Seconds` between two plain lines.
        console: A `rich.console.Console`; by default standard error.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(
        self,
        label: str = "train",
        *,
        every: int | Seconds = Seconds(10.0),  # noqa: B008 -- frozen
        console: rich.console.Console | None = None,
    ):
        check(
            f"Progress(console={console!r})",
            console is None or isinstance(console, rich.console.Console),
            "a rich.console.Console, or None",
        )
        self._label = str(label)
        self.writes = Place(pathlib.Path("the console"), "stream")
        self._console = console or rich.console.Console(stderr=True)
        self._cadence = Cadence("Progress", every)
        self._evaluations: list[Evaluate] = []
        self._start: Visit | None = None
        self._loop: Loop | None = None
        self._said_resumed: Resumed | None = None
        self._said_chosen = 0
        self._said_done: tuple[int, int] | None = None
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: finds the loop's evaluations."""
        self._evaluations = [action for action in loop.actions if isinstance(action, Evaluate)]
        self._loop = loop

    def __enter__(self) -> Progress:
        self._start = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(bar_width=_BAR),
                rich.progress.MofNCompleteColumn(),
                # In a narrow terminal the text wraps.
                rich.progress.TextColumn("{task.fields[status]}", table_column=rich.table.Column(overflow="fold")),
                console=self._console,
            )
            self._task = self._bar.add_task(self._label, total=None, status="compiling")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def next_visit(self, done: int) -> int | None:
        """The next step after `done` at which the action is due; None for a cadence in seconds."""
        return self._cadence.next_visit(done)

    def __call__(self, visit: Visit) -> None:
        """Updates the bar, or prints a line if one is due."""
        if self._start is None:
            self._start = visit
            self._say_where_it_goes_on()
        self._say_what_was_chosen()
        due = self._cadence.due(visit)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=visit.counters.data, total=visit.goal, status=self._status(visit))
        elif due or visit.counters.data >= visit.goal:
            line = f"{self._label}  {visit.counters.data}/{visit.goal}  {self._status(visit)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _say_where_it_goes_on(self) -> None:
        resumed = self._loop.resumed if self._loop is not None else None
        if resumed is not None and resumed is not self._said_resumed:
            self.tell("; ".join([f"{self._label}  resumed from step {resumed.step}", *resumed.changes]))
        self._said_resumed = resumed

    def _say_what_was_chosen(self) -> None:
        said = self._loop.calls.said if self._loop is not None else []
        for sentence in said[self._said_chosen :]:
            self.tell(f"{self._label}  {sentence}")
        self._said_chosen = len(said)

    def nothing_to_do(self, done: int, goal: int, why: str | None) -> None:
        """Says that a run had no step to take; of one that is asked again for the same, only the first time.

        Args:
            done: The steps taken.
            goal: The steps asked for.
            why: Why an action ended the run before its goal; None if it is at its goal.
        """
        more = "Ask for more steps, or start over with a new loop and a new folder for its checkpoints."
        said = f"nothing to do: {why}." if why else f"already at step {done} of {goal}: nothing to do. {more}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=goal, status=said)
        elif self._said_done != (done, goal):
            self.tell(f"{self._label}  {done}/{goal}  {said}")
        self._said_done = (done, goal)

    def tell(self, text: str) -> None:
        """Prints a sentence of another action, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _status(self, visit: Visit) -> str:
        counts = visit.counters
        applied, skipped = (counts.applied, counts.skipped) if counts.known else ("?", "?")
        parts = [f"applied {applied}  skipped {skipped}"]
        scales, losses = (in_turn(visit.outputs, column) for column in ("loss_scale", "loss"))
        parts += [f"{named('scale', part)} {values[-1]:g}" for part, values in scales.items() if len(values)]
        # A bfloat16 of ml_dtypes 0.4 does not support formats.
        parts += [f"{named('loss', part)} {float(values[-1]):.4g}" for part, values in losses.items() if len(values)]
        for one in self._evaluations:
            parts += [f"{one.name} {name} {result:.4g}" for name, result in one.results.items()]
        assert self._start is not None
        steps, seconds = visit.counters.data - self._start.counters.data, visit.seconds - self._start.seconds
        if steps and seconds > 0:
            left = datetime.timedelta(seconds=round((visit.goal - visit.counters.data) * seconds / steps))
            parts += [f"{steps / seconds:.3g} steps/s", f"{left} left"]
        return "  ".join(parts)
