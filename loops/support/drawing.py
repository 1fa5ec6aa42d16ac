"""Figures: how they look, what is said where matplotlib is missing, and SVG for light and dark pages.

The same fate of a magnitude in float16 has the same colour in all figures.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loops.support.errors import LoopError, NotWritable
from loops.support.palette import BLACK, LINE, ON_DARK, RED, SOFT, TEXT, TINY, YELLOW, Mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


def require_matplotlib() -> None:
    """To be called before anything is imported that draws, or measured that is to be drawn.

    Raises:
        LoopError: If it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise LoopError('the figures need matplotlib: pip install "halfstep[study]"')


@contextlib.contextmanager
def drawing(height: float = 3.0) -> Iterator[Figure]:
    """An empty figure, within the style of all of them.

    Args:
        height: In inches.

    Raises:
        LoopError: Without matplotlib.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure((WIDTH, height), layout="constrained")


def save(figure: Figure, path: str | os.PathLike) -> None:
    """Writes a figure, as a PNG, SVG or PDF by the name of the file.

    Raises:
        NotWritable: If it cannot be written.
    """
    try:
        if os.fspath(path).lower().endswith(".svg"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(svg_of(figure))
        else:
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise NotWritable(f"{path}: the figure cannot be written ({error}). Name a .png, .svg or .pdf.") from error


_PAINT = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})\b")
_PLACES = re.compile(r'\b(?:d|x|y|transform)="[^"]*"')
_LONG = re.compile(r"(\.\d\d)\d+")
_NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG: dict[str, object] = {"svg.fonttype": "none", "svg.hashsalt": "halfstep"}
"""Text stays text, and names follow from what is drawn: the same figure has the same bytes."""


def svg_of(figure: Figure) -> str:
    """A figure as an SVG element whose colours change on a dark page. The same figure has the same text.

    Args:
        figure: One drawn with the palette. Other colours stay as they are.
    """
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context(_SVG):  # type: ignore[arg-type]
        figure.savefig(drawn, format="svg", metadata=_NOTHING)
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    # What does not know variables keeps the first of the two.
    text = _PAINT.sub(lambda found: "{0}: {1}; {0}: {2}".format(*found.groups(), colour_variable(found[2])), text)
    # A hundredth of a point cannot be seen, and is a third of the file.
    text = _PLACES.sub(lambda found: _LONG.sub(r"\1", found[0]), text)
    # What has no colour of its own is black, which matplotlib leaves out.
    dark = f"fill: {_DARK[BLACK]}; {dark_variables()}"
    style = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    return text.replace("\n <defs>", f"\n {style}\n <defs>", 1)


def as_source(svg: str) -> str:
    """What `svg_of` returned as the source of an image in a page, where nothing of it meets anything of the page."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode('ascii')}"


def colour_variable(colour: str) -> str:
    """A colour of a figure as CSS that `dark_variables` changes on a dark page.

    Args:
        colour: "#RRGGBB".
    """
    colour = colour.lower()
    return f"var(--{_name(colour)}, {colour})" if colour in _DARK else colour


def dark_variables() -> str:
    """The declarations by which `colour_variable` has another colour on a dark page."""
    return " ".join(f"--{_name(light)}: {dark};" for light, dark in _DARK.items())


def _name(colour: str) -> str:
    return f"on-{colour[1:]}"


_DARK = {light.lower(): dark.lower() for light, dark in ON_DARK.items()}


WIDTH, NARROW = 7.5, 5.6
"""The width of a figure in inches, and of one whose labels can be read on a phone, too."""
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT),
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.07,
}


def sample_of(mark: Mark) -> Line2D:
    """What stands beside a name in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=mark.marker, markersize=4.5, **mark.line)


def shortened(title: str, room: int) -> str:
    """Cuts a title, such as a strategy with many options, to `room` characters."""
    return title if len(title) <= room else title[: room - 1] + "…"


def in_two_lines(title: str, room: int) -> str:
    """Breaks a title that is longer than `room` characters, and cuts what is left after two lines."""
    return textwrap.fill(title, room, max_lines=2, placeholder="…")


def head(axes: Axes, title: str, mark: Mark | None, note: str = "", room: int = 60) -> None:
    """Puts a set-up's mark and title above the left end of a panel, and a note above its right end."""
    from matplotlib.lines import Line2D

    axes.set_title(note, loc="right", color=SOFT, parse_math=False)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.25, "borderaxespad": 0}
    sample = sample_of(mark) if mark else Line2D([], [], linestyle="")
    entry = axes.legend([sample], [in_two_lines(title, room)], handlelength=2.8 if mark else 0, fontsize=9, **place)
    entry.get_texts()[0].set_parse_math(False)


def few(count: int, most: int = 7) -> int:
    """The spacing of markers on a line of `count` points."""
    return max(1, count // most)


class Range(NamedTuple):
    """A range of magnitudes with one fate.

    Attributes:
        start: log2 of its lower end.
        end: log2 of its upper end.
        colour: "#RRGGBB".
        strength: The opacity of its area: yellow is paler than the others.
        said: Its name in a legend.
    """

    start: float
    end: float
    colour: str
    strength: float
    said: str


ZERO = Range(-math.inf, -25, TINY, 0.13, "becomes zero (≤ $2^{-25}$)")
SUBNORMAL = Range(-25, -14, YELLOW, 0.22, "subnormal ($2^{-24}$ to $2^{-14}$)")
INFINITE = Range(16, math.inf, RED, 0.15, "becomes infinite (≥ 65520)")
RANGES = (ZERO, SUBNORMAL, INFINITE)
"""What float16 makes zero, keeps with fewer bits, and makes infinite; between the last two all is well."""


def shade(axes: Axes, low: float, high: float) -> None:
    """Shades the ranges between two ends of an axis of log2."""
    for one in RANGES:
        if one.start < high and one.end > low:
            tint(axes, max(one.start, low), min(one.end, high), one)


def tint(axes: Axes, low: float, high: float, look: Range) -> None:
    """Shades one area in the colour of a range."""
    axes.axvspan(low, high, color=look.colour, alpha=look.strength, linewidth=0, zorder=0)


def range_legend() -> Mapping[str, Patch]:
    """What stands beside the names of the ranges in a legend."""
    from matplotlib.patches import Patch

    return {one.said: Patch(color=one.colour, alpha=min(1.0, 2 * one.strength), linewidth=0) for one in RANGES}
