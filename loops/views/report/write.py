"""Writes a report to one file."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from markupsafe import Markup

import scaler
from loops.diagnose.explain.explain import explain
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import Remedy
from loops.record import Recorded, as_recorded
from loops.record.reading import distinct
from loops.record.skips import in_words, not_logged, what_is_wrong
from loops.record.summary import Digest, digest, sentence
from loops.run.rewind.rewind import open_run
from loops.run.train import POLICIES
from loops.support.errors import LoopError
from loops.support.pages import Table, render
from loops.support.written import as_path, writing
from loops.views.report import figures
from loops.views.report.heat import heat_map
from loops.views.report.tables import cell, replayed_table, scale_cell, strategies_table

MOST = 1_000_000
"""The most bytes of a report."""
_COLUMNS = 600
"""The most points of a curve: about as many as a page is pixels wide."""
_CELLS = 240
"""The most columns of a heat map."""
_HISTOGRAMS = 400_000
"""The most bytes of all histograms."""
_NAMES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "python": "Python",
    "numpy": "NumPy",
    "devices": "devices",
    "intra_op_threads": "threads within an operation",
    "inter_op_threads": "threads between operations",
    "op_determinism": "deterministic operations",
    "jit_compile": "XLA",
}


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
    recorded = distinct([as_recorded(run) for run in runs])
    autopsies: list[Any] = [None] * len(recorded)
    digests = [digest(run) for run in recorded]
    if explain:
        autopsies = [
            _autopsy_of(run, build, progress) if not found.health.healthy else None
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
    facts = [(run.name, _versions_of(run)) for run in runs]
    this = (
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} CPUs"
    )
    trained = [command for command in map(_training_command, runs) if command]
    return render(
        __package__,
        "page.html",
        title=f"Halfstep report: {runs[0].name}" if len(runs) == 1 else f"Halfstep report: {len(runs)} runs",
        sentences=[sentence(*pair) for pair in zip(runs, digests, strict=True)],
        strategies=strategies_table(runs, digests),
        has_headroom=not all(math.isnan(found.margin) for found in digests),
        side_by_side=figures.side_by_side(runs, columns) if len(runs) > 1 else [],
        runs=[
            {
                "name": run.name,
                "notes": run.notes,
                "charts": [
                    *figures.loss_figures(run, columns),
                    *figures.evaluation_figures(run, columns),
                    *figures.part_scale_figures(run, columns),
                    *(
                        figure
                        for draw in (figures.scale_figure, figures.headroom_figure)
                        if (figure := draw(run, columns))
                    ),
                    *figures.gauge_figures(run, columns),
                ],
                "heat": heat_map(run, cells, int(_HISTOGRAMS * share)),
                "autopsy": section(run, found, autopsy),
                "replayed": replayed_table(run),
            }
            for run, found, autopsy in list(zip(runs, digests, autopsies, strict=True))[:shown]
        ],
        several=len(runs) > 1,
        left_out=len(runs) - shown,
        facts=[*facts, ("this report", this)],
        commands="\n".join([*trained, shlex.join(["halfstep", *arguments])]),
    )


def _training_command(run: Recorded) -> str:
    """The command that trains a run of `halfstep train` again; "" for any other run."""
    facts = run.facts
    wanted = {"task": str, "policy": str, "strategy": str, "seed": int}
    if any(not isinstance(facts.get(name), kind) for name, kind in wanted.items()) or facts["policy"] not in POLICIES:
        return ""
    options = {name: facts[name] for name in ("policy", "strategy", "seed")}
    options["steps"], options["out"] = facts.get("steps", int(run.step[-1])), run.place
    words = ["halfstep", "train", facts["task"]]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


def _versions_of(run: Recorded) -> str:
    known = [f"{said} {_spelled(run.versions[name])}" for name, said in _NAMES.items() if name in run.versions]
    return ", ".join(known) or "does not record its versions: halfstep train and hs.Checkpoint do"


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " and ".join(map(str, value))
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, Mapping) else str(value)


def _autopsy_of(run: Recorded, build: str | None, progress: Callable[[str], object]) -> Explanation | str:
    """The explanation that `halfstep explain` gives for a run, or the reason why there is none.

    Args:
        run: A run with a folder, and with checkpoints unless it is short enough to run again from its start.
        build: `MODULE:FUNCTION` that rebuilds the run's loop; None for a run of `halfstep train`.
        progress: Called now and then with a text that says what is being done.
    """
    try:
        return explain(open_run(run.place, build), run=run.place, progress=progress)
    except scaler.ScalerError as error:
        return str(error)


@dataclasses.dataclass(frozen=True)
class _Section:
    """An autopsy on a page.

    Attributes:
        said: The text of the autopsy.
        tried: The remedies that were tried.
        magnitudes: The largest values of each layer.
    """

    said: str
    tried: Table | None = None
    magnitudes: Table | None = None


def section(run: Recorded, found: Digest, autopsy: Explanation | str | None) -> _Section | None:
    """The autopsy's findings, why there are none, or the command for it; None if nothing went wrong."""
    if autopsy is None:
        return _suggested(run, found)
    if isinstance(autopsy, str):
        return _Section(f"This run cannot be explained: {autopsy}")
    tried = magnitudes = None
    if autopsy.remedies:
        # A remedy that did not help is not worth advising.
        rows = [[one.name, _did(one), one.advice if one.helps else one.why_not or ""] for one in autopsy.remedies]
        tried = Table(["tried", "the step", "to do"], rows)
    if autopsy.magnitudes:
        rows = [[row.layer, row.dtype, cell(row.forward), cell(row.backward)] for row in autopsy.magnitudes]
        heads = ["layer", "computed in", "largest output", "largest gradient, scaled"]
        magnitudes = Table(heads, rows, f"Magnitudes in step {autopsy.step}")
    return _Section(autopsy.sentence, tried, magnitudes)


def _suggested(run: Recorded, found: Digest) -> _Section | None:
    if not run.place or (found.health.healthy and not found.skips):
        return None
    if found.health.healthy and not found.health.sure:
        return _Section(f"The log shows nothing wrong: {in_words(found.health)}. {not_logged(found.health)}".rstrip())
    if found.health.healthy:
        return _Section(f"Not needed: {in_words(found.health)}.")
    said = Markup(
        "{} What went wrong last began at step {}. <code>{}</code> takes it again and says why; <code>halfstep report "
        "--explain</code> puts the answer here. Both need the run’s checkpoints, and for a program "
        "<code>--build</code>."
    )
    command = shlex.join(["halfstep", "explain", run.place, "--step", str(found.health.step)])
    return _Section(said.format(what_is_wrong(found.health), f"{found.health.step:,}", command))


def _did(remedy: Remedy) -> str:
    if not remedy.tried:
        return "could not be tried"
    if not remedy.finite:
        return "fails"
    said = "passes" if remedy.at_scale is None else f"passes at a loss scale of {scale_cell(remedy.at_scale)}"
    return said if remedy.helps else f"{said}, no help"
