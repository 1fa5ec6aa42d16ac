"""The progress of a running run, read from its files."""

from __future__ import annotations

import collections
import importlib.util
import math
import pathlib
import time
from collections.abc import Callable

import numpy as np

from loops.record.files import read_summary
from loops.record.joined import joined
from loops.record.log import Log
from loops.record.reading import files_of
from loops.record.run import Recorded
from loops.support.part_names import in_turn
from loops.views.watch.counted_once import CountedOnce
from loops.views.watch.tail import LogTail, TraceTail

HISTORY = 2000
"""Steps kept for the small curves."""

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
        summary: The summary that the run writes at its end; None before.
        other_trace: Whether the folder's trace is of another run than its log. It is then left out.
    """

    def __init__(self, place: pathlib.Path, clock: Callable[[], float] = time.monotonic):
        self._place, self._clock = place, clock
        self._log: LogTail | None = None
        self._trace: TraceTail | None = None
        self._moved = clock()
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=_LOOKS)
        self.rate, self.quiet = math.nan, 0.0
        self.summary: dict | None = None
        self.other_trace = False
        self._start()

    def _start(self) -> None:
        self.step, self.logged, self.attempted, self.last_skip = 0, 0, 0, 0
        self._once = CountedOnce()
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
        return self.step != before

    def _open(self) -> None:
        trace, log = files_of(self._place)
        if log is not None and self._log is None:
            self._log = LogTail(log)
            self._again()
        if trace is not None and self._trace is None and not self.other_trace and importlib.util.find_spec("pyarrow"):
            self._trace = TraceTail(trace)
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
        if any(piece is not None and len(piece.step) and again for piece, again in pieces):
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
                margin = _as_run(piece).margin
                self.margin.extend(margin[~np.isnan(margin)].tolist())
        found = self._once.new(trace, log)
        self._count(_as_run(found), found)

    def _pieces(self) -> list[tuple[Log | None, bool]]:
        """What is new in the trace and in the log, None of a file that does not exist; whether it was there before."""
        pieces: list[tuple[Log | None, bool]] = []
        for file, tail in (("trace", self._trace), ("log", self._log)):
            piece, _ = tail.more() if tail else (None, False)
            if piece is None and tail:
                piece = joined(None, None)
            pieces.append((piece, piece is not None and len(piece.step) > 0 and self._once.goes_back(file, piece)))
        return pieces

    def _count(self, run: Recorded, found: Log) -> None:
        if not len(found.step):
            return
        self.step = max(self.step, int(found.step[-1]))
        self.logged += len(found.step)
        self.attempted += int(run.attempted.sum())
        self.skips.update({cause: len(steps) for cause, steps in run.causes.items()})
        if run.skipped.any():
            self.last_skip = max(self.last_skip, int(run.step[run.skipped][-1]))
        for kept, column in ((self.losses, "loss"), (self.scales, "loss_scale")):
            for part, values in in_turn(found.columns, column).items():
                if len(values):
                    kept.setdefault(part, collections.deque(maxlen=HISTORY)).extend(values.tolist())


def _as_run(found: Log) -> Recorded:
    return Recorded("", "", found.step, found.columns, found.cause)
