"""The result of comparing two runs, also in a few sentences."""

from __future__ import annotations

import dataclasses
import math

from loops.support.json_values import without_nan
from loops.support.text import agreeing, amount, columns

UPDATE, MICRO_BATCH, STEP = "update", "applied micro-batch", "step"
"""What runs are aligned by."""
LOSS = "loss"
"""The name of the series of losses; of a part's it is the beginning of "loss of critic"."""


def is_loss(name: str) -> bool:
    """Whether a series is one of losses. Those of tensors have a kind and a path, such as "weights/dense/kernel"."""
    return name == LOSS or name.startswith(f"{LOSS} of ")


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

    def text(self, width: int | None = None) -> str:
        """The result as text, with a table that is at most `width` characters wide if possible."""
        lines = [self.sentence]
        if self.rows:
            at = [f"differs at {self.by}", f"parts at {self.by}"]
            last = ["from float32"] if self.reference in self.runs else ["closer to float32"]
            heads = ["", "format", *at, "octaves", "largest", *(last if self.reference else [])]
            lines += ["", columns([heads, *map(self._cells, self.rows)], width, left=2)]
        for name, names in zip(self.runs, self.alone, strict=True):
            if names:
                lines += ["", f"only in {name}: {', '.join(names)}"]
        return "\n".join([*lines, "", *self.notes] if self.notes else lines)

    def _cells(self, row: Row) -> list[str]:
        formats = dict.fromkeys(name or "?" for name in row.formats)
        at = ["-" if one is None else str(one) for one in (row.differs_at, row.parts_at)]
        cells = [row.name, " and ".join(formats), *at, _octaves(row.octaves), _octaves(row.largest)]
        if self.reference in self.runs:
            cells.append(_octaves(row.distances[1 - self.runs.index(self.reference)]))
        elif self.reference is not None:
            cells.append("-" if row.closer is None else self.runs[row.closer])
        return cells


def _octaves(value: float) -> str:
    return "-" if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.3g}"


_SOME = 3
"""How many tensors are named if several part at the same step."""


def sentence_of(found: Comparison) -> str:
    """The result in a few sentences."""
    if not found.rows:
        return _parting(found)
    parts = (_parting(found), _otherwise(found), _lost(found), _scales(found), _tensors(found), _closer(found))
    return " ".join(part for part in parts if part)


def _parting(found: Comparison) -> str:
    if not found.steps:
        return f"{found.runs[0]} and {found.runs[1]} have no {found.by} in common."
    if not found.rows:
        return f"{found.runs[0]} and {found.runs[1]} have no value in common to compare."
    if found.differs_at is None:
        return f"Nothing differs in {_count(found)}."
    differs = f"They differ from {found.by} {found.differs_at:,} on"
    if found.parts_at is None:
        return f"{differs}, by no more than rounding in {_all(found)}."
    first = [row for row in found.rows if row.parts_at == found.parts_at]
    # The loss comes from all the others.
    first = [row for row in first if not is_loss(row.name)] or first
    named = ", ".join(f"{row.name} {_by(row)}" for row in first[:_SOME])
    more = f" and {len(first) - _SOME} more" if len(first) > _SOME else ""
    when = "They part" if found.parts_at == found.differs_at else f"{differs}, and by more than rounding"
    said = f"{when} at {found.by} {found.parts_at:,}{_steps(found)}: {named}{more}."
    if found.parts_at == 1 and found.other_batches_at != 1:
        said += (
            f" As that is the first {found.by}, check whether they began with the same weights and took the same batch."
        )
    return said


def _otherwise(found: Comparison) -> str:
    """What parts them other than arithmetic; "" if nothing is known."""
    if found.settings:
        return f"They were set up differently: {'; '.join(found.settings)}. Some differences come from that."
    if found.at_once and not found.scales_known:
        return (
            "Until then they are equal to the last bit, in the same formats. Not every step has its loss scale in both "
            "records: unless the scales differ, something other than arithmetic parts them, such as another learning "
            "rate, other data or another seed."
        )
    if found.at_once:
        return (
            "Until then they are equal to the last bit, in the same formats and at the same loss scale, so something "
            "other than arithmetic parts them: look for another learning rate, other data or another seed."
        )
    return ""


def _all(found: Comparison) -> str:
    return f"the only {found.by}" if found.steps == 1 else f"all of {_count(found)}"


def _count(found: Comparison) -> str:
    return amount(found.steps, found.by).replace("batchs", "batches")


def _steps(found: Comparison) -> str:
    if found.parts_at_steps is None or set(found.parts_at_steps) == {found.parts_at}:
        return ""
    first, second = found.parts_at_steps
    return f" (step {first:,} of {found.runs[0]}, step {second:,} of {found.runs[1]})"


def _lost(found: Comparison) -> str:
    """How many batches each run lost, and from where on their data differ; "" if neither lost any."""
    if not any(found.lost) or found.by == STEP:
        return ""
    lost = [f"{lost or 'none'} of {of:,}" for lost, of in zip(found.lost, found.batches, strict=True)]
    said = (
        f"They are aligned by applied updates, since skipped steps lose their batches: {found.runs[0]} lost {lost[0]}, "
        f"{found.runs[1]} {lost[1]}."
    )
    if found.other_batches_at is None:
        return said
    return (
        f"{said} From {found.by} {found.other_batches_at:,} on they take different batches at the same {found.by}: "
        "differences from there on come from the data, too, not from the arithmetic alone."
    )


def _by(row: Row) -> str:
    if math.isinf(row.octaves):
        return "(zero or not finite in one of them)"
    return f"by {amount(row.octaves, 'octave', '.2g')}"


def _scales(found: Comparison) -> str:
    parts = []
    if found.scale_differs_at is not None:
        parts.append(f"their loss scales differ from step {found.scale_differs_at:,} on{_in(found.scale_differs_in)}")
    if found.decision_differs_at is not None:
        parts.append(f"only one of them skipped step {found.decision_differs_at:,}{_in(found.decision_differs_in)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _in(parts: tuple[str, ...]) -> str:
    """Which parts of a composed step it is, as the end of a sentence; "" for a step of one loss."""
    return f" ({agreeing(len(parts), 'part', 'parts')} {', '.join(parts)})" if parts else ""


def _tensors(found: Comparison) -> str:
    if all(is_loss(row.name) for row in found.rows):
        if all(found.alone):
            return "They have no tensor in common: only their losses were compared."
        return "Only their losses were compared, since not both have a trace of tensors."
    if any(found.alone):
        return f"Tensors that only one of them has: {len(found.alone[0])} and {len(found.alone[1])}."
    return ""


def _closer(found: Comparison) -> str:
    if found.reference is None:
        return (
            "Cannot tell which is closer to float32: neither run is float32. Train the same with the policy float32 "
            "and the same seed, and give it as a third run."
        )
    known = [row for row in found.rows if not any(map(math.isnan, row.distances))]
    if not known:
        return f"Cannot tell which is closer to float32: {found.reference} has no value in common with both."
    if found.reference in found.runs:
        other = found.runs[1 - found.runs.index(found.reference)]
        place = found.runs.index(other)
        farthest = max(known, key=lambda row: row.distances[place])
        of_batches = farthest.of_batches[place]
        alone = f"; other batches alone account for {of_batches:.2g}" if of_batches > 0 else ""
        return (
            f"{found.reference} is float32; {other} is farthest from it in {farthest.name}, by "
            f"{amount(farthest.distances[place], 'octave', '.2g')} at the median {found.by}{alone}."
        )
    hidden = _hidden(known, found.reference)
    if found.closer is None and hidden:
        return f"Cannot tell which is closer to float32 ({found.reference}){hidden}"
    if found.closer is None:
        return f"Neither is closer to float32 than the other ({found.reference})."
    place = found.runs.index(found.closer)
    wins = sum(row.closer == place for row in known)
    said = f"{found.closer} is closer to float32 ({found.reference}), in {wins} of {amount(len(known), 'value')}"
    if found.settings or (found.at_once and found.scales_known):
        said += ", which says nothing about their arithmetic"
    return f"{said}; for others this cannot be determined{hidden}" if hidden else f"{said}."


def _hidden(known: list[Row], reference: str) -> str:
    """Why some values are undecided, as the end of a sentence; "" if there are none."""
    hidden = sum(row.hidden for row in known)
    if not hidden:
        return ""
    return (
        f": in {hidden} of {amount(len(known), 'value')} one run is farther from {reference} by no more than its other "
        "batches explain. Compare with runs that skip no step, such as with hs.Static."
    )
