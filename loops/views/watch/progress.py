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
from loops.record.log import Log
from loops.record.reading import files_of
from loops.record.run import Recorded
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
        loss: The losses of the last steps.
        scale: The loss scales of the last steps.
        margin: The octaves up to the critical scale of the last steps; empty without a trace of tensors.
        rate: Steps per second over the last reads with new steps; NaN before there were two.
        quiet: Seconds since the last new step.
        summary: The summary that the run writes at its end; None before.
    """

    def __init__(self, place: pathlib.Path, clock: Callable[[], float] = time.monotonic):
        self._place, self._clock = place, clock
        self._log: LogTail | None = None
        self._trace: TraceTail | None = None
        self._moved = clock()
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=_LOOKS)
        self.rate, self.quiet = math.nan, 0.0
        self.summary: dict | None = None
        self._start()

    def _start(self) -> None:
        self.step, self.logged, self.attempted, self.last_skip = 0, 0, 0, 0
        self.skips: collections.Counter[str] = collections.Counter()
        self.loss: collections.deque[float] = collections.deque(maxlen=HISTORY)
        self.scale: collections.deque[float] = collections.deque(maxlen=HISTORY)
        self.margin: collections.deque[float] = collections.deque(maxlen=HISTORY)

    def look(self) -> bool:
        """Reads what is new, and returns whether there are new steps.

        Raises:
            LoopError: If the folder has several logs or traces, and none has the usual name.
        """
        self._open()
        before, now = self.step, self._clock()
        for tail, main in ((self._log, True), (self._trace, self._log is None)):
            if tail is not None:
                self._read(tail, main)
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
            # Until now the steps came from the trace alone.
            self._start()
            self._log = LogTail(log)
            if self._trace:
                self._trace.rewind()
        if trace is not None and self._trace is None and importlib.util.find_spec("pyarrow"):
            self._trace = TraceTail(trace)

    def _read(self, tail: LogTail | TraceTail, main: bool) -> None:
        found, from_start = tail.more()
        if found is None or not len(found.step):
            return
        if main and (from_start or found.step[0] <= self.step):
            # A run that resumes truncates its files.
            if not from_start:
                tail.rewind()
                found, _ = tail.more()
                assert found is not None
            self._start()
        run = Recorded("", "", found.step, found.columns, found.cause)
        if main:
            self._count(run, found)
        elif from_start:
            self.margin.clear()
        margin = run.margin
        self.margin.extend(margin[~np.isnan(margin)].tolist())

    def _count(self, run: Recorded, found: Log) -> None:
        if not len(found.step):
            return
        self.step = int(found.step[-1])
        self.logged += len(found.step)
        self.attempted += int(run.attempted.sum())
        self.skips.update({cause: len(steps) for cause, steps in run.causes.items()})
        if run.skipped.any():
            self.last_skip = int(run.step[run.skipped][-1])
        self.loss.extend(found.columns.get("loss", np.zeros(0)).tolist())
        self.scale.extend(found.columns.get("loss_scale", np.zeros(0)).tolist())
