"""What lint says of one layer, or of the whole set-up."""

from __future__ import annotations

import dataclasses
import enum


class Kind(str, enum.Enum):
    """What a finding is of."""

    SAMPLE = "sample"
    NOT_RUN = "not_run"
    FLOAT16_ON_THE_SAMPLE = "float16_on_the_sample"
    MODEL_ON_THE_SAMPLE = "model_on_the_sample"
    NO_SCALING = "no_scaling"
    NEEDLESS_SCALING = "needless_scaling"
    NO_MASTERS = "no_masters"
    LOSS = "loss"
    OUTPUT = "output"
    CONSTANT = "constant"
    WEIGHTS = "weights"
    STATISTICS = "statistics"
    INDICES = "indices"
    FAILS_UNDER_STRESS = "fails_under_stress"
    ENLARGES = "enlarges"
    NOT_STRESSED = "not_stressed"
    SHAPES = "shapes"


class Severity(str, enum.Enum):
    """Whether a finding hurts."""

    HURTS = "hurts"
    NOTE = "note"
    """It harms nothing, or nothing on inputs such as the sample's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is known to hurt.

    Attributes:
        layer: The layer's name, its path where several have that name, or None for what is of the whole set-up.
        finding: What, as a sentence. That of a note begins with "note: ".
        measured: How it was found, with numbers.
        instead: What to write instead.
        kind: What it is of.
        severity: Whether it hurts.
    """

    layer: str | None
    finding: str
    measured: str
    instead: str
    kind: Kind
    severity: Severity = Severity.HURTS

    @property
    def is_note(self) -> bool:
        """Whether it harms nothing, or nothing on inputs such as the sample's."""
        return self.severity is Severity.NOTE


def note(layer: str | None, finding: str, measured: str, instead: str, kind: Kind) -> Finding:
    """A finding that harms nothing."""
    return Finding(layer, f"note: {finding}", measured, instead, kind, Severity.NOTE)
