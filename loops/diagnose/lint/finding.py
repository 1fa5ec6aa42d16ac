"""What lint says of one layer, or of the whole set-up."""

from __future__ import annotations

import dataclasses

_NOTE = "note: "


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is known to hurt.

    Attributes:
        layer: The layer's name, its path where several have that name, or None for what is of the whole set-up.
        finding: What, as a sentence. Of what harms nothing on inputs such as the sample's it begins with "note: ".
        measured: How it was found, with numbers.
        instead: What to write instead.
    """

    layer: str | None
    finding: str
    measured: str
    instead: str

    @property
    def is_note(self) -> bool:
        """Whether it harms nothing, or nothing on inputs such as the sample's."""
        return self.finding.startswith(_NOTE)


def note(layer: str | None, finding: str, measured: str, instead: str) -> Finding:
    """A finding that harms nothing."""
    return Finding(layer, _NOTE + finding, measured, instead)
