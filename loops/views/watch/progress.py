"""The progress of a running run, from what was appended to its log and its trace since the last look."""

from __future__ import annotations

import collections
import functools
import importlib.util
import math
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np

from loops.loop.state import folder as checkpoints
from loops.record.files import EVALUATIONS, read_summary
from loops.record.log import columns_in
from loops.record.reading import files_of, steps_in
from loops.record.run_metadata import checkpoints_of, is_complete
from loops.record.steps import NO_STEPS, Steps, joined, parts_at
from loops.record.trace.file import contents
from loops.record.trace.messages import whole_messages
from loops.record.trace.reading import rows_of
from loops.record.trace.stream import STEP
from loops.support.part_names import in_turn

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
