"""A finding of lint about one layer, or about the whole set-up, and the texts that it is made of."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple


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


class Texts(NamedTuple):
    """What is said of one kind of problem: each text is a format of the values that a rule measured."""

    kind: Kind
    finding: str
    measured: str
    instead: str
    severity: Severity = Severity.HURTS

    def at(self, layer: str | None, /, **values: Any) -> Finding:
        """The finding about a layer, with these values."""
        finding, measured, instead = (text.format_map(values).strip() for text in self[1:4])
        make = note if self.severity is Severity.NOTE else Finding
        return make(layer, finding, measured, instead, self.kind)
