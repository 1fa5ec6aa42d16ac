"""Writes a report to one file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import scaler
from loops.record import Recorded, as_recorded
from loops.record.summary import Digest, digest, sentence
from loops.support.errors import LoopError
from loops.support.pages import render
from loops.support.written.place import as_path, writing
from loops.views.report.explanations import autopsy_of, section
from loops.views.report.figures import headroom_figure, loss_figures, part_scale_figures, scale_figure, side_by_side
from loops.views.report.gauges import gauge_figures
from loops.views.report.heat import heat_map
from loops.views.report.provenance import made
from loops.views.report.strategies import replayed_table, strategies_table

MOST = 1_000_000
"""The most bytes of a report."""
_COLUMNS = 600
"""The most points of a curve: about as many as a page is pixels wide."""
_CELLS = 240
"""The most columns of a heat map."""
_HISTOGRAMS = 400_000
"""The most bytes of all histograms."""


def write_report(
    runs: Sequence[Any],
    out: str | os.PathLike,
    *,
    explain: bool = False,
    build: str | None = None,
    arguments: Sequence[str] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> int:
    """Writes one HTML file about some runs, at most 1 MB, that opens offline.

    Args:
        runs: The runs, each in any form that `loops.views.plots` takes: a folder, a trace, or arrays.
        out: The file to write. Missing folders are created.
        explain: Whether to run the step that went wrong again, as `halfstep explain` does; it takes from seconds to
            minutes for each run.
        build: For `explain`: `MODULE:FUNCTION` that rebuilds a run's loop; None for runs of `halfstep train`.
        arguments: The arguments of `halfstep` that make the report again, shown in it.
        progress: Called now and then with a text that says what is being done.

    Returns:
        The size of the file in bytes.

    Raises:
        scaler.InvalidArgument: For no run, or something that is not a run.
        LoopError: If a run has no readable step, or there are too many runs for one file.
        NotWritable: If the file cannot be written.
    """
    path = as_path("report", "out", out)
    if not runs:
        raise scaler.InvalidArgument("report: no run. Name at least one.")
    if path.is_dir():
        raise scaler.InvalidArgument(f"{path}: a folder: expected the file to write, such as {path / 'report.html'}.")
    recorded = _named([as_recorded(run) for run in runs])
    autopsies: list[Any] = [None] * len(recorded)
    digests = [digest(run) for run in recorded]
    if explain:
        autopsies = [
            autopsy_of(run, build, progress) if not found.health.healthy else None
            for run, found in zip(recorded, digests, strict=True)
        ]
    said = arguments or ["report", *(run.place for run in recorded if run.place), "--out", str(path)]
    for shown, detail in _ways(len(recorded)):
        text = _page(recorded, digests, autopsies, said, shown, detail).encode()
        if len(text) <= MOST:
            break
    else:
        raise LoopError(f"report: {len(recorded)} runs do not fit {MOST:,} bytes. Report on fewer of them.")
    with writing("report", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return len(text)


def _ways(runs: int) -> Iterator[tuple[int, float]]:
    """How many runs get their own figures, and in what detail: the fullest first."""
    yield from ((runs, detail) for detail in (1.0, 0.5, 0.25, 0.1))
    while runs:
        runs //= 2
        yield runs, 0.5


def _named(runs: list[Recorded]) -> list[Recorded]:
    """The runs with distinct names, as far as their places differ."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else dataclasses.replace(run, name=run.place or f"{run.name} {place}")
        for place, run in enumerate(runs, 1)
    ]


def _page(
    runs: Sequence[Recorded],
    digests: Sequence[Digest],
    autopsies: Sequence[Any],
    arguments: Sequence[str],
    shown: int,
    detail: float,
) -> str:
    share = detail / max(shown, 1)
    columns = max(60, int(_COLUMNS * min(1.0, 4 * share)))
    cells = max(40, int(_CELLS * min(1.0, 3 * share)))
    facts, commands = made(runs, arguments)
    return render(
        __package__,
        "page.html",
        title=f"Halfstep report: {runs[0].name}" if len(runs) == 1 else f"Halfstep report: {len(runs)} runs",
        sentences=[sentence(*pair) for pair in zip(runs, digests, strict=True)],
        strategies=strategies_table(runs, digests),
        side_by_side=side_by_side(runs, columns) if len(runs) > 1 else [],
        runs=[
            {
                "name": run.name,
                "notes": run.notes,
                "charts": [
                    *loss_figures(run, columns),
                    *part_scale_figures(run, columns),
                    *(figure for draw in (scale_figure, headroom_figure) if (figure := draw(run, columns))),
                    *gauge_figures(run, columns),
                ],
                "heat": heat_map(run, cells, int(_HISTOGRAMS * share)),
                "autopsy": section(run, found, autopsy),
                "replayed": replayed_table(run),
            }
            for run, found, autopsy in list(zip(runs, digests, autopsies, strict=True))[:shown]
        ],
        several=len(runs) > 1,
        left_out=len(runs) - shown,
        facts=facts,
        commands=commands,
    )
