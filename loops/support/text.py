"""Formats text for people: counts and shares in sentences, errors in one line, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OF_USER_CODE = re.compile(r"\n +\w*Error: ")
"""Separates TensorFlow's stack of calls from the error itself."""
_NOT_FOR_PEOPLE = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node [^}]*\}\} ?| \[Op:\w+\](?: name: )?")
"""Colours, and the wrapper and operation that TensorFlow names of a function of its own."""


def one_line(error: Exception, longest: int = 240) -> str:
    """An error's message in one line, without the stack that TensorFlow adds.

    Args:
        error: An error of Python, TensorFlow or Keras.
        longest: The most characters to return.
    """
    text = " ".join(_OF_USER_CODE.split(_NOT_FOR_PEOPLE.sub("", str(error)))[-1].split())
    text = text.partition(" Arguments received by")[0]
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def amount(count: float, noun: str, form: str = ",") -> str:
    """A number with its noun, such as "1 step", "1,000 steps" and "0.5 octaves".

    Args:
        count: The number, not negative.
        noun: The singular of a noun with a plural in "s".
        form: The format of the number.
    """
    number = f"{count:{form}}"
    return f"{number} {noun}{'' if number == '1' else 's'}"


def agreeing(count: int, one: str, many: str) -> str:
    """The form of a verb for a count, such as "was" or "were"."""
    return one if count == 1 else many


def share(value: float) -> str:
    """A share as a percentage with two significant digits: "8.5%", "0.021%", "<0.001%", "0%", ">99.9%".

    If two digits would round to 100%, a third one is shown: "99.7%".
    """
    if value in (0, 1):
        return f"{value:.0%}"
    if value < 1e-5 or value > 0.999:
        return "<0.001%" if value < 1e-5 else ">99.9%"
    return f"{value:.1%}" if value >= 0.995 else f"{100 * value:.2g}%"


_INDENT = "  "


def columns(rows: Sequence[Sequence[str]], width: int | None = None, left: int = 1, gap: int = 2) -> str:
    """The rows in columns, if `width` has room for them.

    If it is too wide, the names of a row are on a line above its numbers. If that is too wide, too, each cell is on a
    separate line with its heading.

    Args:
        rows: As many cells each; the headings first.
        width: The room, in characters; None for any.
        left: How many of the first cells are names, which begin at the left, as words without a heading do. Numbers end
            at the right.
        gap: Spaces between columns.
    """
    sides = ["<" if place < left or not heading else ">" for place, heading in enumerate(rows[0])]
    lines = _aligned(rows, sides, gap)
    if _fits(lines, width):
        return "\n".join(lines)
    names, numbers = ([row[:left] for row in rows], [row[left:] for row in rows])
    below = [f"{_INDENT}{line}" for line in _aligned(numbers, sides[left:], gap)]
    lines = [line for pair in zip(_aligned(names, sides[:left], gap), below, strict=True) for line in pair]
    if _fits(lines, width):
        return "\n".join(lines)
    room = max(map(len, rows[0]))
    pairs = [zip(rows[0], row, strict=True) for row in rows[1:]]
    return "\n\n".join("\n".join(f"{heading:{room}}{' ' * gap}{cell}" for heading, cell in each) for each in pairs)


def _aligned(rows: Sequence[Sequence[str]], sides: Sequence[str], gap: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * gap).join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _fits(lines: Sequence[str], width: int | None) -> bool:
    return width is None or max(map(len, lines)) <= width
