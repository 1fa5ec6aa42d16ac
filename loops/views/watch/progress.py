"""The progress of a running run, from what was appended to its log and its trace since the last look."""

from __future__ import annotations

import collections
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
        self._log: _LogTail | None = None
        self._trace: _TraceTail | None = None
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
            self._log = _LogTail(log)
            self._again()
        if trace is not None and self._trace is None and not self.other_trace and importlib.util.find_spec("pyarrow"):
            self._trace = _TraceTail(trace)
            self._again()

    def _again(self) -> None:
        """Makes the next read begin at the start of the files."""
        self._start()
        for tail in (self._trace, self._log):
            if tail is not None:
                tail.rewind()

    def _read(self) -> None:
        pieces = self._pieces()
        # A run that resumes truncates its files.
        if any(piece is not None and len(piece) and again for piece, again in pieces):
            self._again()
            self.other_trace = False
            pieces = self._pieces()
        if self._once.are_of_two_runs(pieces[0][0], pieces[1][0]):
            self._trace, self.other_trace = None, True
            self._again()
            pieces = self._pieces()
        trace, log = (piece for piece, _ in pieces)
        for piece in (trace, log):
            if piece is not None:
                self.margin.extend(piece.margin[~np.isnan(piece.margin)].tolist())
        self._count(self._once.new(trace, log))

    def _pieces(self) -> list[tuple[Steps | None, bool]]:
        """What is new in the trace and in the log, None of a file that does not exist; whether it was there before."""
        pieces: list[tuple[Steps | None, bool]] = []
        for file, tail in (("trace", self._trace), ("log", self._log)):
            piece, _ = tail.more() if tail else (None, False)
            if piece is None and tail:
                piece = NO_STEPS
            pieces.append((piece, piece is not None and len(piece) > 0 and self._once.goes_back(file, piece)))
        return pieces

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
        self._ahead: set[int] = set()
        self._both_until = -1.0
        self._unlogged: Steps = NO_STEPS

    def goes_back(self, file: str, piece: Steps) -> bool:
        """Whether a piece has steps that its file has brought before."""
        return bool(piece.step[0] <= self._ends.get(file, -1))

    def are_of_two_runs(self, trace: Steps | None, log: Steps | None) -> bool:
        """Whether a step that the log has now has other numbers in the trace, which may have brought it before."""
        traced = joined(self._unlogged, trace)
        if log is None or not len(log):
            self._unlogged = traced
            return False
        self._unlogged = traced.where(traced.step > log.step[-1])
        return parts_at(traced, log) is not None

    def new(self, trace: Steps | None, log: Steps | None) -> Steps:
        """The steps of two pieces that were not counted before. A piece is None if there is no such file."""
        both = joined(trace, log)
        fresh = np.array([step not in self._ahead for step in both.step.tolist()], bool)
        for file, piece in (("trace", trace), ("log", log)):
            if piece is None:
                self._ends[file] = math.inf
            elif len(piece):
                self._ends[file] = int(piece.step[-1])
        until = min(self._ends.get(file, -1) for file in ("trace", "log"))
        self._ahead.update(both.step[both.step > until].tolist())
        if until > self._both_until:
            self._both_until, self._ahead = until, {step for step in self._ahead if step > until}
        return both.where(fresh)


class _Tail:
    """Reads a file piece by piece, and again from the start if it was truncated or replaced.

    Args:
        path: The file, which may not exist yet.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._end = 0
        self._file = (0, 0)

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._end = 0

    def more(self) -> tuple[bytes, bool]:
        """The new bytes, and whether they begin at the start of the file. Only `take` advances the position."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                if found.st_size < self._end or identity != self._file:
                    self._end, self._file = 0, identity
                file.seek(self._end)
                return file.read(), self._end == 0
        except OSError:
            self._end = 0
            return b"", True

    def take(self, size: int) -> None:
        """Marks the next `size` bytes as read."""
        self._end += size


class _LogTail:
    """The steps that were added to a log of lines."""

    def __init__(self, path: pathlib.Path):
        self._tail = _Tail(path)
        self._comma = path.suffix == ".csv"
        self._header = b""

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._tail.rewind()

    def more(self) -> tuple[Steps, bool]:
        """The new steps, and whether they begin at the start of the file. An incomplete line waits for its end."""
        data, from_start = self._tail.more()
        whole = data[: data.rfind(b"\n") + 1]
        self._tail.take(len(whole))
        if self._comma and from_start:
            self._header = whole[: whole.find(b"\n") + 1]
        elif self._comma:
            whole = self._header + whole
        return columns_in(whole.decode("utf-8", errors="replace").splitlines(), comma=self._comma), from_start


class _TraceTail:
    """The steps that were added to a trace. An incomplete message waits for its end."""

    def __init__(self, path: pathlib.Path):
        self._tail = _Tail(path)
        self._opening = b""

    def rewind(self) -> None:
        """Makes the next read begin at the start of the file."""
        self._tail.rewind()

    def more(self) -> tuple[Steps | None, bool]:
        """The new steps, None before the schema is complete, and whether they begin at the start of the file."""
        data, from_start = self._tail.more()
        if from_start:
            self._opening = b""
        found = contents(self._opening + data)
        if found.what is None:
            return None, from_start
        self._tail.take(found.end - len(self._opening))
        self._opening = self._opening or data[: next(whole_messages(data)).end]
        return steps_in(rows_of(found, STEP)), from_start
