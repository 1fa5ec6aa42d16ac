"""Rows of cells as lines of text, which lose no cell where there is little room."""

from __future__ import annotations

from collections.abc import Sequence

_GAP, _INDENT = "  ", "  "


def columns(rows: Sequence[Sequence[str]], width: int | None = None, left: int = 1) -> str:
    """The rows in columns, if `width` has room for them.

    Where it has not, the names of a row stand in a line above its numbers. Where that is too wide, too, each cell has a
    line of its own beside its heading.

    Args:
        rows: As many cells each; the headings first.
        width: The room, in characters; None for any.
        left: How many of the first cells are names, which begin at the left. Numbers end at the right.
    """
    sides = ["<"] * left + [">"] * (len(rows[0]) - left)
    lines = _aligned(rows, sides)
    if _fits(lines, width):
        return "\n".join(lines)
    names, numbers = ([row[:left] for row in rows], [row[left:] for row in rows])
    below = [f"{_INDENT}{line}" for line in _aligned(numbers, sides[left:])]
    lines = [line for pair in zip(_aligned(names, sides[:left]), below, strict=True) for line in pair]
    if _fits(lines, width):
        return "\n".join(lines)
    room = max(map(len, rows[0]))
    pairs = [zip(rows[0], row, strict=True) for row in rows[1:]]
    return "\n\n".join("\n".join(f"{heading:{room}}{_GAP}{cell}" for heading, cell in each) for each in pairs)


def _aligned(rows: Sequence[Sequence[str]], sides: Sequence[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _fits(lines: Sequence[str], width: int | None) -> bool:
    return width is None or max(map(len, lines)) <= width
