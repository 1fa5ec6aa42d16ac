"""What a comparison of two runs says."""

from __future__ import annotations

import dataclasses

from loops.json_values import without_nan


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of the loss, or of the largest magnitude of one tensor, in two runs.

    Attributes:
        name: Of the tensor; "loss".
        formats: That of each run, where it is known.
        steps: How many steps both runs have it of.
        differs_at: The first step at which it is not the same, or None.
        parts_at: The first step at which it differs by more than eight roundings of the coarser run, or None.
        octaves: |log2| of the ratio at that step; infinite where one of both is zero, infinite or NaN.
        largest: The largest finite such ratio over all steps; NaN where there is none.
        distances: Of both runs the median of such ratios to the float32 run; NaN where there is none.
        closer: The place, 0 or 1, of the run that is closer to float32, or None.
    """

    name: str
    formats: tuple[str | None, str | None]
    steps: int
    differs_at: int | None
    parts_at: int | None
    octaves: float
    largest: float
    distances: tuple[float, float] = (float("nan"), float("nan"))
    closer: int | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        runs: Their names.
        steps: How many steps both have.
        scale_differs_at: The first step at which their loss scales differ, or None.
        decision_differs_at: The first step that one of them skipped and the other did not, or None.
        rows: The loss, then the tensors that both have, in the order of the first run.
        alone: The tensors that only one of them has, for each.
        reference: The name of the float32 run, or None.
        closer: The name of the run that is closer to float32, or None.
        sentence: All that as text.
        notes: What is missing, and how to record it.
    """

    runs: tuple[str, str]
    steps: int
    scale_differs_at: int | None
    decision_differs_at: int | None
    rows: tuple[Row, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    reference: str | None
    closer: str | None
    sentence: str
    notes: tuple[str, ...]

    @property
    def differs_at(self) -> int | None:
        """The first step at which anything differs, or None."""
        return min((row.differs_at for row in self.rows if row.differs_at is not None), default=None)

    @property
    def parts_at(self) -> int | None:
        """The first step at which anything differs by more than rounding, or None."""
        return min((row.parts_at for row in self.rows if row.parts_at is not None), default=None)

    def to_dict(self) -> dict:
        """As JSON has it: null for numbers that JSON lacks, such as infinite octaves."""
        return without_nan({"differs_at": self.differs_at, "parts_at": self.parts_at, **dataclasses.asdict(self)})
