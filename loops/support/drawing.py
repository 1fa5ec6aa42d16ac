"""Figures need matplotlib, which is in an extra: what is said without it, and where a figure cannot be written."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loops.support.errors import LoopError, NotWritable

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
    from loops.support.svg import svg_of

    try:
        if os.fspath(path).lower().endswith(".svg"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(svg_of(figure))
        else:
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise NotWritable(f"{path}: the figure cannot be written ({error}). Name a .png, .svg or .pdf.") from error
