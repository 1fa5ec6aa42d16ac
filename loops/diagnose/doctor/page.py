"""Writes the memory of a step as an HTML page: the picture and its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loops.diagnose.memory.footprint import Bytes, Footprint
from loops.support.pages import Table, render
from loops.support.svg import as_source, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = [field.name for field in dataclasses.fields(Bytes) if field.name != "uncounted"]


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
