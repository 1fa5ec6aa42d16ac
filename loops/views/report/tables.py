"""Tables as HTML: the numbers behind each figure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

import numpy as np

from loops.record.run import Recorded
from loops.record.thin import sampled

_ROWS = 24
"""Rows of a table of steps."""
_SKIPS = 60
"""Rows of a table of skips."""
NONE = "\u2013"
_INFINITY = "\u221e"


def cell(value: float | int | str | None, form: str = ".4g") -> str:
    """A value as the text of a cell."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if isinstance(value, str):
        return html.escape(value)
    if math.isinf(value):
        return _INFINITY if value > 0 else f"\u2212{_INFINITY}"
    return (f"{value:,}" if isinstance(value, int) else f"{value:{form}}").replace("-", "\u2212")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table. The heads and cells are HTML; the first cell of a row is its head."""
    first = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{one}</td>" for one in row[1:])}</tr>' for row in rows
    )
    said = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{said}<thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def behind(body: str) -> str:
    """What a reader may open below a figure."""
    return f"<details><summary>The numbers</summary>{body}</details>"


def of_steps(run: Recorded, columns: Sequence[tuple[str, np.ndarray]]) -> str:
    """Some columns at evenly spaced steps."""
    places = sampled(len(run), _ROWS).tolist()
    rows = [[cell(int(run.step[at])), *(cell(float(values[at])) for _, values in columns)] for at in places]
    said = "" if len(places) == len(run) else f"{len(places)} of {len(run):,} steps"
    return table(["step", *(html.escape(name) for name, _ in columns)], rows, said)


def of_skips(run: Recorded) -> str:
    """The skipped steps, the first and the last where there are many."""
    places = np.flatnonzero(run.skipped).tolist()
    if not places:
        return ""
    shown = places if len(places) <= _SKIPS else [*places[: _SKIPS // 2], *places[-_SKIPS // 2 :]]
    scale = run.column("loss_scale")
    rows = [[cell(int(run.step[at])), cell(str(run.cause[at]) or "unknown"), cell(float(scale[at]))] for at in shown]
    said = "Skipped steps"
    if len(shown) < len(places):
        said = f"Skipped steps: the first {_SKIPS // 2} and the last {_SKIPS // 2} of {len(places):,}"
    return table(["step", "cause", "loss scale"], rows, said)
