"""The float32 run that two others are measured against, and what other batches alone make in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from loops.record.run import Recorded
from loops.views.compare.series import Series, median_octaves, series_of


@dataclasses.dataclass(frozen=True)
class Truth:
    """The float32 run.

    Attributes:
        series: Its values by name, aligned as those of the two runs.
        at_batches: For each run the float32 run's values at that run's batches, aligned as the run; None where the
            batches of both are the same.
    """

    series: Mapping[str, Series]
    at_batches: tuple[Mapping[str, Series] | None, ...]

    @classmethod
    def of(cls, true: Recorded, number: np.ndarray, runs: Sequence[Recorded], numbers: Sequence[np.ndarray]) -> Truth:
        """Reads the float32 run.

        Args:
            true: The run.
            number: What each of its steps counts as.
            runs: The two others.
            numbers: The same of them.
        """
        counted = (_at_steps(true, run, counts) for run, counts in zip(runs, numbers, strict=True))
        at_batches = tuple(None if np.array_equal(one, number) else series_of(true, one) for one in counted)
        return cls(series_of(true, number), at_batches)

    def of_batches(self, name: str, place: int) -> float:
        """The median octaves that other batches make in a value, 0 where one run has the same batches."""
        at_batches = self.at_batches[place]
        return 0.0 if at_batches is None else median_octaves(at_batches[name], self.series[name])


def _at_steps(true: Recorded, run: Recorded, number: np.ndarray) -> np.ndarray:
    """What the float32 run's steps would count as if it had applied and skipped as the other one."""
    at = np.searchsorted(run.step, true.step).clip(0, len(run) - 1)
    return np.where(run.step[at] == true.step, number[at], -1)
