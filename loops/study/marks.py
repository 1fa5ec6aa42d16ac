"""One colour, line and marker for each set-up of a study, wherever it is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from loops.support.palette import BLACK, BLUE, DASHES, GREEN, ORANGE, PINK, RED, Mark, mark

_SETUPS = {
    "float32": (BLACK, "o"),
    "mixed-none": (ORANGE, "s"),
    "mixed-dynamic": (BLUE, "^"),
    "float16-none": (RED, "D"),
    "float16-static": (PINK, "v"),
    "float16-dynamic": (GREEN, "X"),
}


def marks(summary: Mapping) -> dict[str, Mark]:
    """The mark of each set-up of a study, by name. A small-loss set-up looks like its twin, dashed."""
    found: dict[str, Mark] = {}
    others = itertools.count()
    for name in (row["name"] for row in summary["setups"]):
        tint, marker = _SETUPS.get(name.removeprefix("small-"), (None, ""))
        if tint:
            found[name] = Mark(tint, DASHES[1] if name.startswith("small-") else (), marker)
        else:
            found[name] = mark(next(others))
    return found
