"""The input pipeline of a program, beside its step."""

from __future__ import annotations

import dataclasses

from loops.diagnose.doctor.program import Program
from loops.diagnose.doctor.timing import Batches, Running, Spread, Turns, take_turns


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The input pipeline beside the step, in milliseconds.

    Attributes:
        alone: For a batch, with nothing else to do.
        turns: The step on a batch in memory, and the step that takes its batch from the pipeline.
        attempted: Steps that were taken on the pipeline's batches.
        skipped: How many of these moved no weight.
    """

    alone: Spread
    turns: Turns
    attempted: int
    skipped: int

    @property
    def share(self) -> float:
        """Of the time of a step with its pipeline, what the pipeline adds."""
        return max(0.0, 1 - 1 / self.turns.ratio.median)


def pipeline_of(program: Program, step: Running, seconds: float) -> Pipeline | None:
    """The step alone against the step with its pipeline; None for a program without one."""
    if program.dataset is None:
        return None
    batches = Batches(program.dataset, program.batch)
    alone = take_turns(batches.next, batches.next, seconds / 2).before
    seen: list[tuple[int, int]] = []

    def piped() -> None:
        before = step.attempted, step.skipped
        step(batches.next())
        seen.append((step.attempted - before[0], step.skipped - before[1]))

    turns = take_turns(step, piped, seconds)
    return Pipeline(alone, turns, sum(attempted for attempted, _ in seen), sum(skipped for _, skipped in seen))
