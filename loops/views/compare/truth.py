"""The float32 run that two others are measured against, and how much other batches alone change it."""

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
        series: Its values by name, aligned with those of the two runs.
        at_batches: For each run, the float32 run's values at that run's batches, aligned with the run; None if both
            took the same batches.
    """

    series: Mapping[str, Series]
    at_batches: tuple[Mapping[str, Series] | None, ...]

    @classmethod
    def of(cls, true: Recorded, number: np.ndarray, runs: Sequence[Recorded], numbers: Sequence[np.ndarray]) -> Truth:
        """Reads the float32 run.

        Args:
            true: The run.
            number: Int64 [steps], the number that each of its steps is aligned by.
            runs: The two other runs.
            numbers: The numbers of their steps.
        """
        counted = (_at_steps(true, run, counts) for run, counts in zip(runs, numbers, strict=True))
        at_batches = tuple(None if np.array_equal(one, number) else series_of(true, one) for one in counted)
        return cls(series_of(true, number), at_batches)

    def of_batches(self, name: str, place: int) -> float:
        """The median octaves that other batches alone change a value by; 0 if the run has the same batches."""
        at_batches = self.at_batches[place]
        return 0.0 if at_batches is None else median_octaves(at_batches[name], self.series[name])


def _at_steps(true: Recorded, run: Recorded, number: np.ndarray) -> np.ndarray:
    """The numbers of the float32 run's steps if it had applied and skipped as the other run did."""
    at = np.searchsorted(run.step, true.step).clip(0, len(run) - 1)
    return np.where(run.step[at] == true.step, number[at], -1)
