"""A comparison in a few sentences."""

from __future__ import annotations

import math

from loops.compared.result import Comparison, Row

_SOME = 3
"""Tensors that are named where several part at the same step."""


def sentence_of(found: Comparison) -> str:
    """What came out, in a few sentences."""
    if not found.rows:
        return _parting(found)
    return " ".join(part for part in (_parting(found), _scales(found), _tensors(found), _closer(found)) if part)


def _parting(found: Comparison) -> str:
    if not found.steps:
        return f"{found.runs[0]} and {found.runs[1]} have no step in common."
    if not found.rows:
        return f"{found.runs[0]} and {found.runs[1]} have nothing in common that could be compared."
    if found.differs_at is None:
        return f"Nothing differs in {found.steps:,} steps."
    differs = f"They differ from step {found.differs_at:,} on"
    if found.parts_at is None:
        return f"{differs}, by no more than rounding in all of {found.steps:,} steps."
    first = [row for row in found.rows if row.parts_at == found.parts_at]
    # The loss comes from all the others.
    first = [row for row in first if row.name != "loss"] or first
    named = ", ".join(f"{row.name} {_by(row)}" for row in first[:_SOME])
    more = f" and {len(first) - _SOME} more" if len(first) > _SOME else ""
    when = "They part" if found.parts_at == found.differs_at else f"{differs}, and by more than rounding"
    said = f"{when} at step {found.parts_at:,}: {named}{more}."
    if found.parts_at == 1:
        said += " As that is the first step, look whether they began with the same weights and took the same batch."
    return said


def _by(row: Row) -> str:
    if math.isinf(row.octaves):
        return "(zero or not finite in one of them)"
    return f"by {row.octaves:.2g} octaves"


def _scales(found: Comparison) -> str:
    told = []
    if found.scale_differs_at is not None:
        told.append(f"their loss scales differ from step {found.scale_differs_at:,} on")
    if found.decision_differs_at is not None:
        told.append(f"only one of them skipped step {found.decision_differs_at:,}")
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _tensors(found: Comparison) -> str:
    if all(row.name == "loss" for row in found.rows):
        if all(found.alone):
            return "They have no tensor in common: only their losses were compared."
        return "Without a trace of tensors of both, only their losses were compared."
    if any(found.alone):
        return f"Tensors of one of them alone: {len(found.alone[0])} and {len(found.alone[1])}."
    return ""


def _closer(found: Comparison) -> str:
    if found.reference is None:
        return (
            "Which is closer to float32 cannot be told, since none of them is float32: train the same with the policy "
            "float32 and the same seed, and give it as a third run."
        )
    known = [row for row in found.rows if not any(map(math.isnan, row.distances))]
    if not known:
        return f"Which is closer to float32 cannot be told: {found.reference} has nothing in common with both."
    if found.reference in found.runs:
        other = found.runs[1 - found.runs.index(found.reference)]
        place = found.runs.index(other)
        farthest = max(known, key=lambda row: row.distances[place])
        return (
            f"{found.reference} is float32; {other} is farthest from it in {farthest.name}, by "
            f"{farthest.distances[place]:.2g} octaves at the median step."
        )
    if found.closer is None:
        return f"Neither is closer to float32 than the other ({found.reference})."
    place = found.runs.index(found.closer)
    wins = sum(row.closer == place for row in known)
    return f"{found.closer} is closer to float32 ({found.reference}), in {wins} of {len(known)} values."
