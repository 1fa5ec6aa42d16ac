"""Times the input pipeline of a program, alone and with its step."""

from __future__ import annotations

import dataclasses

from loops.diagnose.doctor.program import Program
from loops.diagnose.doctor.timing import Batches, PairedTiming, Running, Spread, time_interleaved


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The times of the input pipeline.

    Attributes:
        alone: The milliseconds of one batch, with nothing else running.
        turns: The times of the step with a batch in memory, and of the step with a batch from the pipeline.
        attempted: The number of steps with batches from the pipeline.
        skipped: The number of these steps that were skipped.
    """

    alone: Spread
    turns: PairedTiming
    attempted: int
    skipped: int

    @property
    def share(self) -> float:
        """The share of the pipeline in the time of a step with its pipeline."""
        return max(0.0, 1 - 1 / self.turns.ratio.median)


def pipeline_of(program: Program, step: Running, seconds: float) -> Pipeline | None:
    """Compares the step alone with the step with its pipeline; None for a program without a pipeline."""
    if program.dataset is None:
        return None
    batches = Batches(program.dataset, program.batch)
    alone = time_interleaved(batches.next, batches.next, seconds / 2).before
    seen: list[tuple[int, int]] = []

    def with_pipeline() -> None:
        before = step.attempted, step.skipped
        step(batches.next())
        seen.append((step.attempted - before[0], step.skipped - before[1]))

    turns = time_interleaved(step, with_pipeline, seconds)
    return Pipeline(alone, turns, sum(attempted for attempted, _ in seen), sum(skipped for _, skipped in seen))
