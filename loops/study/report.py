"""The report of a study: figures and one self-contained HTML file."""

from __future__ import annotations

import errno
import json
import os
import pathlib
from collections.abc import Mapping

from loops.record.files import STEPS, SUMMARY
from loops.record.log import read_log
from loops.study.costs import has_costs
from loops.study.page import page
from loops.study.summaries import Steps, split_rows
from loops.support.drawing import require_matplotlib
from loops.support.errors import LoopError
from loops.support.svg import as_source
from loops.support.written.place import writing


def report_study(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Draws a study and writes `report.html` around the figures.

    Args:
        folder: The folder that `run_study` wrote, with `summary.json` and `runs/*/steps.jsonl`.

    Returns:
        The files written to `folder`: `comparison.png`, `loss.png`, `loss_scale.png`, `gradients.png`, `costs.png` if
        time or memory is known, `small_loss.png` if the study has set-ups with a small loss, and `report.html`, which
        needs no other file. They show failed runs up to the failure.

    Raises:
        loops.LoopError: If matplotlib is not installed.
        OSError: If a file of the study is missing, or one of the report cannot be written.
    """
    require_matplotlib()
    from loops.study.comparison_figure import comparison_figure
    from loops.study.costs_figure import costs_figure
    from loops.study.curves import loss_figure, loss_scale_figure
    from loops.study.histograms import gradients_figure, small_loss_figure

    folder = pathlib.Path(folder)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    steps = read_steps(folder, summary)
    figures = {
        "comparison": comparison_figure(summary, steps),
        "loss": loss_figure(summary, steps),
        "loss_scale": loss_scale_figure(summary, steps),
        "gradients": gradients_figure(summary),
    }
    # An earlier study in this folder may have left them.
    for name in ("small_loss.png", "costs.png"):
        (folder / name).unlink(missing_ok=True)
    if has_costs(summary):
        figures["costs"] = costs_figure(summary)
    if split_rows(summary)[1]:
        figures["small_loss"] = small_loss_figure(summary, steps)
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        with writing("study", written[-1]):
            figure.savefig(written[-1], dpi=200, facecolor="white")
    images = {name: as_source(figure) for name, figure in figures.items()}
    written.append(folder / "report.html")
    with writing("study", written[-1]):
        written[-1].write_text(page(summary, steps, images), encoding="utf-8")
    return written


def read_steps(folder: pathlib.Path, summary: Mapping) -> Steps:
    """The steps of each run, by its `folder`; none for a run that failed before its first step.

    Raises:
        FileNotFoundError: If the steps of a run that finished are missing.
        LoopError: If a run's folder does not lie in that of the study.
    """
    steps: dict[str, list[dict]] = {}
    for run in summary["runs"]:
        path = folder / run["folder"] / STEPS
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LoopError(f"{folder / SUMMARY}: its run {run['folder']!r} lies outside of the study's folder.")
        if "error" not in run and not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        steps[run["folder"]] = read_log(path)
    return steps
