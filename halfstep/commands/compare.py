"""`halfstep lab compare`: two runs, tensor by tensor."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loops.views.compare import Comparison, Row

_NONE = "-"


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "compare",
        help="where two runs part, tensor by tensor, by how much, and which is closer to float32",
        description="Compares the largest magnitude of each tensor that the traces of both runs have, gradients "
        "divided by the loss scale, and the losses. The result says something about the arithmetic only if both runs "
        "began with the same weights and took the same batches. The runs are aligned by applied updates; runs that do "
        "not record which steps were applied are aligned by steps. It also counts the batches that each run lost to "
        "skipped steps.",
    )
    parser.add_argument("first", metavar="RUN", help="the --out of halfstep train, a program's folder, or one file")
    parser.add_argument("second", metavar="RUN", help="the run to compare it with")
    parser.add_argument("reference", metavar="FLOAT32", nargs="?", help="the same run in float32, if neither is")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    from halfstep.terminal import quiet, width
    from loops.record.files import to_json
    from loops.views.compare.compare import compare

    quiet()
    found = compare(options.first, options.second, options.reference)
    print(to_json(found.to_dict()) if options.json else text(found, width()))


def text(found: Comparison, width: int | None = None) -> str:
    """A comparison as text, with a table that is at most `width` characters wide if possible."""
    from loops.support.text import columns

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
