"""`halfstep compare`: two runs, tensor by tensor."""

from __future__ import annotations

import argparse
import math

from halfstep.terminal import quiet, width
from loops.record.files import to_json
from loops.support.columns import columns
from loops.views.compare import Comparison, Row, compare

_NONE = "-"


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    quiet()
    found = compare(options.first, options.second, options.reference)
    print(to_json(found.to_dict()) if options.json else text(found, width()))


def text(found: Comparison, width: int | None = None) -> str:
    """A comparison as lines for a person, its table no wider than `width` characters if it can be."""
    lines = [found.sentence]
    if found.rows:
        at = [f"differs at {found.by}", f"parts at {found.by}"]
        heads = ["", "format", *at, "octaves", "largest", *_last_head(found)]
        cells = [heads, *([*_cells(row), *_last_cell(row, found)] for row in found.rows)]
        lines += ["", columns(cells, width, left=2)]
    for name, names in zip(found.runs, found.alone, strict=True):
        if names:
            lines += ["", f"only in {name}: {', '.join(names)}"]
    if found.notes:
        lines += ["", *found.notes]
    return "\n".join(lines)


def _last_head(found: Comparison) -> list[str]:
    if found.reference is None:
        return []
    return ["from float32"] if found.reference in found.runs else ["closer to float32"]


def _last_cell(row: Row, found: Comparison) -> list[str]:
    if found.reference is None:
        return []
    if found.reference not in found.runs:
        return [_NONE if row.closer is None else found.runs[row.closer]]
    return [_octaves(row.distances[1 - found.runs.index(found.reference)])]


def _octaves(value: float) -> str:
    return _NONE if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.3g}"


def _cells(row: Row) -> list[str]:
    formats = [name or "?" for name in row.formats]
    return [
        row.name,
        formats[0] if formats[0] == formats[1] else " and ".join(formats),
        _NONE if row.differs_at is None else str(row.differs_at),
        _NONE if row.parts_at is None else str(row.parts_at),
        _octaves(row.octaves),
        _octaves(row.largest),
    ]
