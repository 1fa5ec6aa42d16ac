"""Counts each step of a log and of a trace once, although both are read piece by piece."""

from __future__ import annotations

import math

import numpy as np

from loops.record.joined import joined, parts_at
from loops.record.log import Log


class CountedOnce:
    """The steps that were counted, as far as a file may still bring them a second time."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._ahead: set[int] = set()
        self._both_until = -1.0
        self._unlogged = joined(None, None)

    def goes_back(self, file: str, piece: Log) -> bool:
        """Whether a piece has steps that its file has brought before."""
        return bool(piece.step[0] <= self._ends.get(file, -1))

    def are_of_two_runs(self, trace: Log | None, log: Log | None) -> bool:
        """Whether a step that the log has now has other numbers in the trace, which may have brought it before."""
        traced = joined(self._unlogged, trace)
        if log is None or not len(log.step):
            self._unlogged = traced
            return False
        later = traced.step > log.step[-1]
        columns = {name: values[later] for name, values in traced.columns.items()}
        self._unlogged = Log(traced.step[later], columns, traced.cause[later], 0)
        return parts_at(traced, log) is not None

    def new(self, trace: Log | None, log: Log | None) -> Log:
        """The steps of two pieces that were not counted before. A piece is None if there is no such file."""
        both = joined(trace, log)
        fresh = np.array([step not in self._ahead for step in both.step.tolist()], bool)
        for file, piece in (("trace", trace), ("log", log)):
            if piece is None:
                self._ends[file] = math.inf
            elif len(piece.step):
                self._ends[file] = int(piece.step[-1])
        until = min(self._ends.get(file, -1) for file in ("trace", "log"))
        self._ahead.update(both.step[both.step > until].tolist())
        if until > self._both_until:
            self._both_until, self._ahead = until, {step for step in self._ahead if step > until}
        columns = {name: values[fresh] for name, values in both.columns.items()}
        return Log(both.step[fresh], columns, both.cause[fresh], 0)
