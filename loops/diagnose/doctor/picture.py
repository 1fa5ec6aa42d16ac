"""Draws the memory of a step: under each policy, and layer by layer; also as an HTML page with its numbers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loops.diagnose.memory.footprint import Bytes, Footprint
from loops.support.drawing import as_source, drawing, require_matplotlib, save, svg_of
from loops.support.errors import NotWritable
from loops.support.pages import Table, render
from loops.support.palette import BLUE, GREEN, ORANGE, PINK, RED, SKY, TEXT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_PARTS = {
    "weights": BLUE,
    "masters": SKY,
    "slots": GREEN,
    "gradients": PINK,
    "copies": ORANGE,
    "activations": RED,
}
_LAYERS = 24
_KINDS = (".png", ".svg", ".pdf", ".html")


def write_picture(found: Sequence[Footprint], path: str | os.PathLike) -> None:
    """Draws footprints into a file: PNG, SVG or PDF by its name, or a page with the picture in it for ".html".

    Raises:
        LoopError: If matplotlib is not installed.
        NotWritable: If the file cannot be written.
    """
    figure, path = memory_figure(found), pathlib.Path(path)
    if path.suffix.lower() != ".html":
        save(figure, path)
        return
    try:
        path.write_text(memory_page(found, figure), encoding="utf-8")
    except OSError as error:
        raise NotWritable(f"{path}: the page cannot be written ({error.strerror or error}).") from error


def check_picture(path: str | os.PathLike) -> None:
    """Checks that a picture can be written, before the diagnosis takes its time.

    Raises:
        LoopError: If matplotlib is not installed.
        NotWritable: If the folder does not exist, or the name does not end like a picture's.
    """
    require_matplotlib()
    path = pathlib.Path(path)
    if path.suffix.lower() not in _KINDS or not path.parent.is_dir():
        raise NotWritable(
            f"{path}: no picture can be written there. Name one of {', '.join(_KINDS)}, in an existing folder."
        )


def memory_figure(found: Sequence[Footprint]) -> Figure:
    """The picture as a matplotlib Figure."""
    own = found[0]
    layers = sorted(own.layers.items(), key=lambda item: -item[1].total)[:_LAYERS]
    heights = [1.2 + 0.35 * len(found), 1.0 + 0.25 * len(layers)]
    with drawing(sum(heights)) as figure:
        above, below = figure.subplots(2, 1, height_ratios=heights)
        _bars(above, [(one.policy, one.all) for one in found])
        above.set_title("under each policy; “|” with gradient checkpointing", loc="left")
        for at, one in enumerate(found):
            if one.total_recomputed is not None:
                above.plot(one.total_recomputed / 1e6, at, "|", color=TEXT, markersize=14)
        _bars(below, [(name or "(the loss, all else)", one) for name, one in layers])
        below.set_title(f"by layer, {own.policy}", loc="left", parse_math=False)
        below.set_xlabel("MB")
        figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=len(_PARTS), fontsize=8)
        return figure


def _bars(axes: Any, rows: Sequence[tuple[str, Bytes]]) -> None:
    starts = [0.0] * len(rows)
    for part, colour in _PARTS.items():
        widths = [(getattr(one, part) or 0) / 1e6 for _, one in rows]
        axes.barh(range(len(rows)), widths, left=starts, color=colour, label=part, height=0.7)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()


def memory_page(found: Sequence[Footprint], figure: Figure) -> str:
    """A page that needs no other file.

    Args:
        found: The footprint under each policy, the model's own first.
        figure: The picture of these footprints.
    """
    own = found[0]
    layers = sorted(own.layers.items(), key=lambda item: -item[1].total)
    return render(
        __package__,
        "memory.html",
        title="Memory of a training step",
        picture=as_source(svg_of(figure)),
        policies=Table(
            ("MB", *_PARTS, "total", "with checkpointing"),
            [(one.policy, *_cells(one.all), _cell(one.total_recomputed)) for one in found],
            "Under each policy",
        ),
        layers=Table(
            ("MB", *_PARTS, "total"),
            [(name or "(the loss, all else)", *_cells(one)) for name, one in layers],
            f"By layer, {own.policy}",
        ),
    )


def _cells(one: Bytes) -> list[str]:
    return [_cell(getattr(one, part)) for part in (*_PARTS, "total")]


def _cell(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.3g}"
