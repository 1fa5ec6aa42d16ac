"""What a comparison of two runs says."""

from __future__ import annotations

import dataclasses

from loops.support.json_values import without_nan


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of the loss, or of the largest magnitude of one tensor, in two runs.

    Attributes:
        name: Of the tensor; "loss".
        formats: That of each run, where it is known.
        steps: How many updates, or what `Comparison.by` says, both runs have it of.
        differs_at: The first of these at which it is not the same, or None.
        parts_at: The first of these at which it differs by more than eight roundings of the coarser run, or None.
        octaves: |log2| of the ratio there; infinite where one of both is zero, infinite or NaN.
        largest: The largest finite such ratio over all of them; NaN where there is none.
        distances: Of both runs the median of such ratios to the float32 run; NaN where there is none.
        of_batches: Of both runs the median of such ratios that other batches alone make in the float32 run: its own
            values, where the run has made as many updates, to those at the run's batch. 0 where the batches are the
            same, NaN where nobody can tell.
        closer: The place, 0 or 1, of the run that is closer to float32, or None: also where the other one is farther by
            no more than twice what other batches make.
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
        """Whether other batches alone may be why one of the runs is farther from float32."""
        return self.closer is None and any(self.of_batches) and self.distances[0] != self.distances[1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        runs: Their names.
        by: By what they are aligned, and what all numbers count but those of steps: "update", "applied micro-batch" or
            "step".
        steps: How many of these both have.
        lost: How many batches each run lost to skipped steps; None where a run does not tell.
        batches: How many batches each run took.
        other_batches_at: The first update at which they took other batches, since one of them had skipped more; None
            where there is none. What differs from there on is of the data, too.
        scale_differs_at: The first step at which their loss scales differ, or None.
        decision_differs_at: The first step that one of them skipped and the other did not, or None.
        parts_at_steps: The step of each run at `parts_at`, or None.
        rows: The loss, then the tensors that both have, in the order of the first run.
        alone: The tensors that only one of them has, for each.
        settings: The settings that differ as far as the runs say them, such as "learning_rate was 0.1 and 0.2".
        reference: The name of the float32 run, or None.
        closer: The name of the run that is closer to float32, or None.
        sentence: All that as text.
        notes: What is missing, and how to record it.
    """

    runs: tuple[str, str]
    by: str
    steps: int
    lost: tuple[int | None, int | None]
    batches: tuple[int, int]
    other_batches_at: int | None
    scale_differs_at: int | None
    decision_differs_at: int | None
    parts_at_steps: tuple[int, int] | None
    rows: tuple[Row, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    settings: tuple[str, ...]
    reference: str | None
    closer: str | None
    sentence: str
    notes: tuple[str, ...]

    @property
    def differs_at(self) -> int | None:
        """The first update, or what `by` says, at which anything differs, or None."""
        return min((row.differs_at for row in self.rows if row.differs_at is not None), default=None)

    @property
    def parts_at(self) -> int | None:
        """The first update, or what `by` says, at which anything differs by more than rounding, or None."""
        return min((row.parts_at for row in self.rows if row.parts_at is not None), default=None)

    @property
    def at_once(self) -> bool:
        """Whether they part by more than rounding after the same bits, in the same formats and at the same loss scale.

        Then something else than arithmetic parts them.
        """
        at = self.parts_at
        if at is None or at == 1 or self.differs_at != at or any(row.formats[0] != row.formats[1] for row in self.rows):
            return False
        if self.other_batches_at is not None and self.other_batches_at <= at:
            return False
        steps = max(self.parts_at_steps or (at, at))
        others = (self.scale_differs_at, self.decision_differs_at)
        return all(other is None or other > steps for other in others)

    def to_dict(self) -> dict:
        """As JSON has it: null for numbers that JSON lacks, such as infinite octaves."""
        return without_nan({"differs_at": self.differs_at, "parts_at": self.parts_at, **dataclasses.asdict(self)})
