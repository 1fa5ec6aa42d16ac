"""Figures: what is said where matplotlib is missing or a file cannot be written, and SVG for light and dark pages."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loops.support.errors import LoopError, NotWritable
from loops.support.palette import BLACK, ON_DARK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    from loops.support.plot_style import STYLE, WIDTH

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
_STYLE: dict[str, object] = {"svg.fonttype": "none", "svg.hashsalt": "halfstep"}
"""Text stays text, and names follow from what is drawn: the same figure has the same bytes."""


def svg_of(figure: Figure) -> str:
    """A figure as an SVG element whose colours change on a dark page. The same figure has the same text.

    Args:
        figure: One drawn with the palette. Other colours stay as they are.
    """
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
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
