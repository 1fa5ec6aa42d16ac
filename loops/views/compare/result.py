"""The result of comparing two runs."""

from __future__ import annotations

import dataclasses

from loops.support.json_values import without_nan
from loops.views.compare.aligned import STEP


@dataclasses.dataclass(frozen=True)
class Row:
    """The loss, or the largest magnitude of one tensor, compared between two runs.

    Attributes:
        name: The tensor's name, "loss", or "loss of critic" for a part of a composed step.
        formats: The dtype in each run; None if unknown.
        steps: How many updates (or whatever `Comparison.by` counts) both runs have a value for.
        differs_at: The first of these with different values, or None.
        parts_at: The first of these where the values differ by more than eight roundings of the coarser run, or None.
        octaves: |log2| of the ratio at `parts_at`; infinite if one of the values is zero, infinite or NaN.
        largest: The largest finite |log2| ratio over all of them; NaN if there is none.
        distances: For each run, the median |log2| ratio to the float32 run; NaN if there is none.
        of_batches: For each run, the median |log2| ratio that other batches alone cause in the float32 run: between its
            values at the same update and at the run's batch. 0 if the batches are the same, NaN if unknown.
        closer: The index, 0 or 1, of the run closer to float32. None if neither is, or if the difference is at most
            twice what other batches cause.
    """

    name: str
    formats: tuple[str | None, str | None]
    steps: int
    differs_at: int | None
    parts_at: int | None
    octaves: float
    largest: float
    distances: tuple[float, float] = (float("nan"), float("nan"))
    of_batches: tuple[float, float] = (float("nan"), float("nan"))
    closer: int | None = None

    @property
    def hidden(self) -> bool:
        """Whether other batches alone may explain why one of the runs is farther from float32."""
        return self.closer is None and any(self.of_batches) and self.distances[0] != self.distances[1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        runs: The names of the two runs.
        by: What they are aligned by, "update", "applied micro-batch" or "step". All numbers count these, except those
            said to be steps.
        steps: How many of these both have.
        lost: How many batches each run lost to skipped steps; None if a run does not record it.
        batches: How many batches each run took.
        other_batches_at: The first update at which they took different batches, since one of them had skipped more;
            None if there is none. Differences from there on come from the data, too.
        scale_differs_at: The first step at which their loss scales differ, or those of a part, or None.
        scales_known: Whether both recorded the loss scale of each step.
        decision_differs_at: The first step that one of them skipped and the other did not, or None.
        parts_at_steps: The step of each run at `parts_at`, or None.
        rows: The loss, then the tensors that both have, in the order of the first run.
        alone: The tensors that only one of them has, for each.
        settings: The recorded settings that differ, such as "learning_rate was 0.1 and 0.2".
        reference: The name of the float32 run, or None.
        closer: The name of the run that is closer to float32, or None.
        sentence: The result as text.
        notes: What is missing from the runs, and how to record it.
        scale_differs_in: The parts of a composed step whose scales differ at `scale_differs_at`.
        decision_differs_in: The parts that only one of the runs skipped at `decision_differs_at`.
    """

    runs: tuple[str, str]
    by: str
    steps: int
    lost: tuple[int | None, int | None]
    batches: tuple[int, int]
    other_batches_at: int | None
    scale_differs_at: int | None
    scales_known: bool
    decision_differs_at: int | None
    parts_at_steps: tuple[int, int] | None
    rows: tuple[Row, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    settings: tuple[str, ...]
    reference: str | None
    closer: str | None
    sentence: str
    notes: tuple[str, ...]
    scale_differs_in: tuple[str, ...] = ()
    decision_differs_in: tuple[str, ...] = ()

    @property
    def differs_at(self) -> int | None:
        """The first update (or whatever `by` counts) at which anything differs, or None."""
        return min((row.differs_at for row in self.rows if row.differs_at is not None), default=None)

    @property
    def parts_at(self) -> int | None:
        """The first update (or whatever `by` counts) where anything differs by more than rounding, or None."""
        return min((row.parts_at for row in self.rows if row.parts_at is not None), default=None)

    @property
    def at_once(self) -> bool:
        """Whether they part suddenly: bit for bit equal before, in the same formats, at no loss scales known to differ.

        Then something other than arithmetic parts them, if the loss scales are known.
        """
        at = self.parts_at
        # Of steps that a log lacks nothing is known: what parts the runs may have begun there.
        if at is None or at == 1 or self.by == STEP or self.differs_at != at:
            return False
        if any(row.formats[0] != row.formats[1] for row in self.rows):
            return False
        if self.other_batches_at is not None and self.other_batches_at <= at:
            return False
        steps = max(self.parts_at_steps or (at, at))
        others = (self.scale_differs_at, self.decision_differs_at)
        return all(other is None or other > steps for other in others)

    def to_dict(self) -> dict:
        """The fields as JSON values, with null for numbers that JSON lacks, such as infinite octaves."""
        return without_nan({"differs_at": self.differs_at, "parts_at": self.parts_at, **dataclasses.asdict(self)})
