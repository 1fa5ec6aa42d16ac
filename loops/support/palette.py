"""The colours of all pages and figures. The style sheet and matplotlib both take them from here.

How lines that stand for different things look: what tells one from another also without its colour.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
SERIES = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
"""Of lines in one figure, in this order. Black stays for a reference, and yellow is too light for a line."""

TEXT, SOFT, FAINT, BAND, LINE = "#1D1F21", "#5C6166", "#A9AFB5", "#C4C4C4", "#DADDE0"
"""Text; what is beside it; a line behind others; an area behind lines; a rule or a grid."""

TINY, MIDDLE, HUGE = "#00507E", "#F1F1EC", "#B34700"
"""Of magnitudes, from those that float16 makes zero to those that it makes infinite."""

CAUSES = {
    "OVERFLOW": "red",
    "LOSS": "pink",
    "BACKWARD": "green",
    "UPDATE": "orange",
    "TOO_LARGE": "blue",
    "SPIKE": "text",
}
"""The name of the colour of a skip, by its cause."""
BY_NAME = {"red": RED, "pink": PINK, "green": GREEN, "orange": ORANGE, "blue": BLUE, "text": TEXT}

# The lines of a page are thin. Where Okabe and Ito's colours have too little contrast for that, they are darker here.
LIGHT_PAGE = {
    "text": TEXT,
    "soft": SOFT,
    "faint": FAINT,
    "line": LINE,
    "page": "#FFFFFF",
    "card": "#F7F8F9",
    "paper": "#FFFFFF",
    "blue": BLUE,
    "red": RED,
    "green": "#008A63",
    "pink": "#B5568F",
    "orange": "#C98500",
    "cell-low": TINY,
    "cell-mid": MIDDLE,
    "cell-high": HUGE,
    "cell-zero": YELLOW,
    "cell-nan": PINK,
    "cell-inf": BLACK,
}
DARK_PAGE = {
    "text": "#E4E6E8",
    "soft": "#A5ABB1",
    "faint": "#6F767D",
    "line": "#3A3F44",
    "page": "#16181A",
    "card": "#1D2023",
    "paper": "#1D2023",
    "blue": SKY,
    "red": "#F0813A",
    "green": "#2CC295",
    "pink": "#DD9CC2",
    "orange": "#E9B13D",
    "cell-low": "#58B7F0",
    "cell-mid": "#26292C",
    "cell-high": "#FF8C42",
    "cell-zero": YELLOW,
    "cell-nan": "#DD9CC2",
    "cell-inf": "#FFFFFF",
}
"""The same names on a dark page."""

ON_DARK = {
    "#FFFFFF": DARK_PAGE["paper"],
    BLACK: DARK_PAGE["cell-inf"],
    TEXT: DARK_PAGE["text"],
    SOFT: DARK_PAGE["soft"],
    FAINT: DARK_PAGE["faint"],
    BAND: "#565B61",
    LINE: DARK_PAGE["line"],
    BLUE: DARK_PAGE["blue"],
    RED: DARK_PAGE["red"],
    GREEN: DARK_PAGE["green"],
    PINK: DARK_PAGE["pink"],
    ORANGE: DARK_PAGE["orange"],
    SKY: "#C3E4F8",
    TINY: DARK_PAGE["cell-low"],
    MIDDLE: DARK_PAGE["cell-mid"],
    HUGE: DARK_PAGE["cell-high"],
}
"""What each colour of a figure becomes on a dark page; yellow can be seen on both."""


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
