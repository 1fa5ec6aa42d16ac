"""A finding of lint about one layer, or about the whole set-up."""

from __future__ import annotations

import dataclasses
import enum


class Kind(str, enum.Enum):
    """What a finding is about."""

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
    XLA = "xla"
    FORMAT = "format"


class Severity(str, enum.Enum):
    """Whether a finding hurts."""

    HURTS = "hurts"
    NOTE = "note"
    """It is harmless, at least on inputs such as the sample's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem that lint found.

    Attributes:
        layer: The layer's name, or its path if several layers have that name; None for the whole set-up.
        finding: The problem, in one sentence. For a note it begins with "note: ".
        measured: The measurement behind it, with numbers.
        instead: What to write instead.
        kind: What the finding is about.
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
        """Whether it is harmless, at least on inputs such as the sample's."""
        return self.severity is Severity.NOTE


def note(layer: str | None, finding: str, measured: str, instead: str, kind: Kind) -> Finding:
    """Makes a finding that is harmless."""
    return Finding(layer, f"note: {finding}", measured, instead, kind, Severity.NOTE)
