"""How lines that stand for different things look: what tells one from another also without its colour."""

from __future__ import annotations

from typing import Any, NamedTuple

from loops.support.palette import SERIES

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (5, 1.5, 1, 1.5), (1.5, 1))
_MARKERS = "os^DvXP"


class Mark(NamedTuple):
    """How a line is drawn.

    Attributes:
        colour: "#RRGGBB".
        dashes: In points on and off; () for a solid line.
        marker: As matplotlib names it.
    """

    colour: str
    dashes: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a line."""
        return {"color": self.colour, "linestyle": (0, self.dashes) if self.dashes else "-", "linewidth": 1.4}


def mark(number: int) -> Mark:
    """The mark of a line by its number, from 0: 84 come before two look alike."""
    return Mark(SERIES[number % len(SERIES)], DASHES[number % len(DASHES)], _MARKERS[number % len(_MARKERS)])
