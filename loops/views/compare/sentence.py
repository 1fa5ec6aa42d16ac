"""A comparison in a few sentences."""

from __future__ import annotations

import math

from loops.support.text import agreeing, amount
from loops.views.compare.aligned import STEP
from loops.views.compare.result import Comparison, Row
from loops.views.compare.series import is_loss

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
        return (
            f"{found.reference} is float32; {other} is farthest from it in {farthest.name}, by "
            f"{amount(farthest.distances[place], 'octave', '.2g')} at the median {found.by}"
            f"{_of_batches(farthest.of_batches[place])}."
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


def _of_batches(octaves: float) -> str:
    return f"; other batches alone account for {octaves:.2g}" if octaves > 0 else ""


def _hidden(known: list[Row], reference: str) -> str:
    """Why some values are undecided, as the end of a sentence; "" if there are none."""
    hidden = sum(row.hidden for row in known)
    if not hidden:
        return ""
    return (
        f": in {hidden} of {amount(len(known), 'value')} one run is farther from {reference} by no more than its other "
        "batches explain. Compare with runs that skip no step, such as with hs.Static."
    )
