"""Follows a run until it ends or the watcher stops, in one line for a pipe, a few for a terminal.

It reads what was appended to the run's log and its trace since the last look.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable

import numpy as np
import rich.console
import rich.live
import rich.text

from loops.loop.state import folder as checkpoints
from loops.record.files import EVALUATIONS, check_run, checkpoints_of, is_complete, read_summary
from loops.record.log import columns_in
from loops.record.reading import files_of, steps_in
from loops.record.steps import NO_STEPS, Steps, joined, parts_at
from loops.record.trace.file import contents, rows_of
from loops.record.trace.stream import STEP, whole_messages
from loops.support.part_names import in_turn, named
from loops.support.text import amount

_POLL = 0.5
"""Seconds between two reads."""
_LINE = 10.0
"""Seconds between two lines of output without a terminal."""
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=*#"
_SLOW = 30.0
"""Seconds without a new step after which the panel says so."""
_OTHER_TRACE = "its trace is of another run, and left out"


def watch(
    run: str | os.PathLike, console: rich.console.Console | None = None, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Shows a run that another process trains, until it has ended.

    It has ended once `halfstep train` has written its summary, or ten seconds after the last step if the newest
    checkpoint is complete and no process holds the run's lock. A run with checkpoints that was stopped or killed may be
    resumed, and is waited for. A run without checkpoints has ended if no action holds a lock in the folder, and there
    was no new step for half a minute.

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
            if course.ended:
                return
            sleep(_POLL)


def _print(course: LiveRun, console: rich.console.Console, sleep: Callable[[float], object]) -> None:
    said, waited = "", _LINE
    while True:
        course.look()
        text = line(course)
        if course.ended or (waited >= _LINE and text != said):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            said, waited = text, 0.0
        if course.ended:
            return
        sleep(_POLL)
        waited += _POLL


def line(course: LiveRun) -> str:
    """The state in one line."""
    if not course.step:
        return "waiting for the first step"
    parts = [f"step {course.step}", f"applied {course.attempted - course.skips.total()}", f"skipped {_skipped(course)}"]
    parts += [f"{named('scale', part)} {values[-1]:g}" for part, values in course.scales.items()]
    parts += [f"{named('loss', part)} {_loss(values[-1])}" for part, values in course.losses.items()]
    if course.margin:
        parts.append(f"headroom {_octaves(course)}")
    if not math.isnan(course.rate):
        parts.append(f"{course.rate:.3g} steps/s")
    if course.ended:
        parts.append(_ended(course.summary or {}))
    if course.other_trace:
        parts.append(_OTHER_TRACE)
    return "  ".join(parts)


def panel(course: LiveRun, name: str, width: int, *, blocks: bool) -> rich.text.Text:
    """The state in a few lines, with small curves.

    Args:
        course: The run so far.
        name: The run's name.
        width: Columns of the terminal.
        blocks: Whether the terminal shows characters beyond ASCII.
    """
    text = rich.text.Text(no_wrap=True, overflow="ellipsis")
    text.append(name, "bold")
    text.append(f"  {_state(course)}\n", "dim")
    if not course.step:
        return text
    room = max(10, min(60, width - 40))
    rows = [("step", f"{course.step:,}", "")]
    for part, values in course.losses.items():
        rows.append((named("loss", part), _loss(values[-1]), spark(_log(values), room, blocks=blocks)))
    for part, values in course.scales.items():
        rows.append((named("loss scale", part), f"{values[-1]:g}", spark(_log(values), room, blocks=blocks)))
    if course.margin:
        rows.append(("headroom", _octaves(course), spark(course.margin, room, blocks=blocks)))
    wide = max(12, *(len(label) + 1 for label, _, _ in rows))
    for label, value, curve in rows:
        text.append(f"  {label:{wide}}", "dim")
        text.append(f"{value:22}")
        text.append(f"{curve}\n", "cyan")
    text.append(f"  {'skipped':{wide}}", "dim")
    text.append(_skipped(course), "yellow" if course.skips else "")
    if course.skips:
        text.append(f"  last at step {course.last_skip:,}", "dim")
    if course.other_trace:
        text.append(f"\n  {_OTHER_TRACE}", "yellow")
    return text


def spark(values: Iterable[float], width: int, *, blocks: bool) -> str:
    """A curve in one line of text, from the lowest to the highest value; a blank where no value is finite."""
    marks = _BLOCKS if blocks else _ASCII
    found = np.array(list(values), np.float64)
    parts = np.array_split(found, min(width, len(found))) if len(found) else []
    means = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts])
    known = means[~np.isnan(means)]
    if not len(known):
        return ""
    low, spread = known.min(), np.ptp(known)
    places = np.nan_to_num((means - low) / spread if spread else np.zeros_like(means)) * (len(marks) - 1)
    return "".join(" " if np.isnan(mean) else marks[round(place)] for mean, place in zip(means, places, strict=True))


def _ended(summary: dict) -> str:
    """How a run ended, in words."""
    for name, form in (("accuracy", "accuracy {:.1%}"), ("perplexity", "perplexity {:.3f}")):
        if isinstance(summary.get(name), (int, float)):
            return f"ended, {form.format(summary[name])}"
    return "ended"


def _state(course: LiveRun) -> str:
    if course.ended:
        return _ended(course.summary or {})
    if not course.step:
        return "waiting for the first step"
    if course.quiet > _SLOW:
        return f"no new step for {course.quiet:.0f} seconds"
    return "" if math.isnan(course.rate) else f"{course.rate:.3g} steps/s"


def _skipped(course: LiveRun) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in course.skips.most_common() if cause != "unknown")
    of = f" of {amount(course.logged, 'logged step')}" if course.logged < course.step else ""
    return str(course.skips.total()) + of + (f" ({causes})" if causes else "")


def _octaves(course: LiveRun) -> str:
    last = course.margin[-1]
    return amount(last, "octave", "g") if math.isfinite(last) else "none: no scale helps"


def _loss(last: float) -> str:
    return f"{last:.4g}" if math.isfinite(last) else "not finite"


def _log(values: Iterable[float]) -> np.ndarray:
    found = np.array(list(values), np.float64)
    positive = found[np.isfinite(found)]
    return np.log(found) if len(positive) and positive.min() > 0 else found


HISTORY = 2000
"""Steps kept for the small curves."""

_COMPLETE, _UNLOCKED = 20, 60
"""Looks without a new step after which a run has ended: with a complete checkpoint, or without checkpoints and locks.

`halfstep train` evaluates the model between its last checkpoint and its summary.
"""
_LOOKS = 20
"""Reads that the rate is measured over."""


class LiveRun:
    """What a run has recorded so far. It reads the run's files, and writes nothing.

    Args:
        place: The run's folder.
        clock: Returns the time in seconds.

    Attributes:
        step: The last step, 0 before the first.
        logged: How many steps were recorded, of those up to `step`.
        attempted: How many of them applied or skipped an update.
        skips: How many of them were skipped, by cause.
        last_skip: The last skipped step, or 0.
        losses: Those of the last steps, by part of a composed step; under "" for a step of one loss.
        scales: The loss scales of the last steps, likewise.
        margin: The octaves up to the critical scale of the last steps; empty without a trace of tensors.
        rate: Steps per second over the last reads with new steps; NaN before there were two.
        quiet: Seconds since the last new step.
        summary: The summary that `halfstep train` writes at its end; None before, and for a program.
        ended: Whether the run has ended.
        other_trace: Whether the folder's trace is of another run than its log. It is then left out.
    """

    def __init__(self, place: pathlib.Path, clock: Callable[[], float] = time.monotonic):
        self._place, self._clock = place, clock
        self._log: _Tail | None = None
        self._trace: _Tail | None = None
        self._moved = clock()
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=_LOOKS)
        self.rate, self.quiet = math.nan, 0.0
        self.summary: dict | None = None
        self.ended, self._idle = False, 0
        self.other_trace = False
        self._start()

    def _start(self) -> None:
        self.step, self.logged, self.attempted, self.last_skip = 0, 0, 0, 0
        self._once = _CountedOnce()
        self.skips: collections.Counter[str] = collections.Counter()
        self.losses: dict[str, collections.deque[float]] = {}
        self.scales: dict[str, collections.deque[float]] = {}
        self.margin: collections.deque[float] = collections.deque(maxlen=HISTORY)

    def look(self) -> bool:
        """Reads what is new, and returns whether there are new steps.

        Raises:
            LoopError: If the folder has several logs or traces, and none has the usual name.
        """
        self._open()
        before, now = self.step, self._clock()
        self._read()
        if self.step != before:
            if self.step < before:
                self._seen.clear()
            self._seen.append((now, self.step))
            (start, first), (end, last) = self._seen[0], self._seen[-1]
            # Steps arrive in bursts, one for each visit, so the rate between two reads alone means little.
            self.rate = (last - first) / (end - start) if end > start else math.nan
            self._moved = now
        self.quiet = now - self._moved
        # `halfstep train` writes it when a run ends, and removes it when one begins.
        self.summary = read_summary(self._place)
        self._idle = self._idle + 1 if self.step == before else 0
        self.ended = self.summary is not None or self._program_ended()
        return self.step != before

    def _program_ended(self) -> bool:
        """Whether a program has ended the run: one that was stopped or killed may go on from its checkpoint."""
        where = checkpoints_of(self._place)
        if checkpoints.numbers(where):
            return self._idle >= _COMPLETE and is_complete(where)
        locks = {one.name for one in self._place.glob(".*.lock")} - {f".{EVALUATIONS}.lock"}
        return self.step > 0 and self._idle >= _UNLOCKED and not locks

    def _open(self) -> None:
        trace, log = files_of(self._place)
        if log is not None and self._log is None:
            self._log = _Tail(log, functools.partial(_in_lines, comma=log.suffix == ".csv"))
            self._again()
        if trace is not None and self._trace is None and not self.other_trace and importlib.util.find_spec("pyarrow"):
            self._trace = _Tail(trace, _in_messages)
            self._again()

    def _again(self) -> None:
        """Makes the next read begin at the start of the files."""
        self._start()
        for tail in (self._trace, self._log):
            if tail is not None:
                tail.rewind()

    def _read(self) -> None:
        trace, log = self._pieces()
        # A run that resumes truncates its files.
        if any(self._once.goes_back(file, piece) for file, piece in (("trace", trace), ("log", log))):
            self._again()
            self.other_trace = False
            trace, log = self._pieces()
        if self._once.are_of_two_runs(trace, log):
            self._trace, self.other_trace = None, True
            self._again()
            trace, log = self._pieces()
        for piece in (trace, log):
            if piece is not None:
                self.margin.extend(piece.margin[~np.isnan(piece.margin)].tolist())
        self._count(self._once.new(trace, log))

    def _pieces(self) -> tuple[Steps | None, Steps | None]:
        """What is new in the trace and in the log, None of a file that does not exist."""
        return self._trace.more() if self._trace else None, self._log.more() if self._log else None

    def _count(self, found: Steps) -> None:
        if not len(found):
            return
        self.step = max(self.step, int(found.step[-1]))
        self.logged += len(found)
        self.attempted += int(found.attempted.sum())
        self.skips.update({cause: len(steps) for cause, steps in found.causes.items()})
        if found.skipped.any():
            self.last_skip = max(self.last_skip, int(found.step[found.skipped][-1]))
        for kept, column in ((self.losses, "loss"), (self.scales, "loss_scale")):
            for part, values in in_turn(found.columns, column).items():
                if len(values):
                    kept.setdefault(part, collections.deque(maxlen=HISTORY)).extend(values.tolist())


class _CountedOnce:
    """The steps that were counted, as far as a file may still bring them a second time."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._ahead: Steps = NO_STEPS

    def goes_back(self, file: str, piece: Steps | None) -> bool:
        """Whether a piece has steps that its file has brought before."""
        return piece is not None and len(piece) > 0 and bool(piece.step[0] <= self._ends.get(file, -1))

    def are_of_two_runs(self, trace: Steps | None, log: Steps | None) -> bool:
        """Whether a step that the log has now has other numbers in the trace, which may have brought it before."""
        return log is not None and parts_at(joined(self._ahead, trace), log) is not None

    def new(self, trace: Steps | None, log: Steps | None) -> Steps:
        """The steps of two pieces that were not counted before. A piece is None if there is no such file."""
        both = joined(trace, log)
        for file, piece in (("trace", trace), ("log", log)):
            if piece is None:
                self._ends[file] = math.inf
            elif len(piece):
                self._ends[file] = int(piece.step[-1])
        fresh = both.where(~np.isin(both.step, self._ahead.step))
        ahead = joined(self._ahead, both)
        self._ahead = ahead.where(ahead.step > min(self._ends.get(file, -1) for file in ("trace", "log")))
        return fresh


class _Tail:
    """The steps that were added to a log or a trace; all of them if the file was truncated or replaced.

    Args:
        path: The file, which may not exist yet.
        read: Reads what was added to a file, after its opening, a header or a schema, that was read before: returns the
            steps, how many of the added bytes are whole, and the opening.
    """

    def __init__(self, path: pathlib.Path, read: Callable[[bytes, bytes], tuple[Steps, int, bytes]]):
        self._path, self._read = path, read
        self._file = (0, 0)
        self.rewind()

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._end, self._opening = 0, b""

    def more(self) -> Steps:
        """The new steps. An incomplete line or message waits for its end."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size < self._end or (found.st_dev, found.st_ino) != self._file:
                    self.rewind()
                    self._file = (found.st_dev, found.st_ino)
                file.seek(self._end)
                data = file.read()
        except OSError:
            self.rewind()
            return NO_STEPS
        steps, size, self._opening = self._read(self._opening, data)
        self._end += size
        return steps


def _in_lines(header: bytes, data: bytes, *, comma: bool) -> tuple[Steps, int, bytes]:
    whole = data[: data.rfind(b"\n") + 1]
    steps = columns_in((header + whole).decode("utf-8", errors="replace").splitlines(), comma=comma)
    return steps, len(whole), header or (whole[: whole.find(b"\n") + 1] if comma else b"")


def _in_messages(schema: bytes, data: bytes) -> tuple[Steps, int, bytes]:
    found = contents(schema + data)
    if found.what is None:
        return NO_STEPS, 0, schema
    return steps_in(rows_of(found, STEP)), found.end - len(schema), schema or data[: next(whole_messages(data)).end]
