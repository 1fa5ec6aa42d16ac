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
from loops.support.drawing import as_source, require_matplotlib, svg_of
from loops.support.errors import LoopError
from loops.support.written.place import writing


def report_study(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Draws a study and writes `report.html` around the figures.

    Args:
        folder: The folder that `run_study` wrote, with `summary.json` and `runs/*/steps.jsonl`.

    Returns:
        The files written to `folder`: `comparison.svg`, `loss.svg`, `loss_scale.svg` if a scale ever moved or a step
        was skipped, `gradients.svg`, `costs.svg` if time or memory is known, `small_loss.svg` if the study has set-ups
        with a small loss, and `report.html`, which needs no other file. They show failed runs up to the failure.

    Raises:
        loops.LoopError: If matplotlib is not installed.
        OSError: If a file of the study is missing, or one of the report cannot be written.
    """
    require_matplotlib()
    from loops.study.curves import loss_figure, loss_scale_figure
    from loops.study.dots import comparison_figure, costs_figure
    from loops.study.histograms import gradients_figure, small_loss_figure

    folder = pathlib.Path(folder)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    steps = read_steps(folder, summary)
    figures = {
        "comparison": comparison_figure(summary, steps),
        "loss": loss_figure(summary, steps),
        "loss_scale": loss_scale_figure(summary, steps),
        "gradients": gradients_figure(summary),
        "costs": costs_figure(summary) if has_costs(summary) else None,
        "small_loss": small_loss_figure(summary, steps) if split_rows(summary)[1] else None,
    }
    written, images = [], {}
    for name, figure in figures.items():
        # An earlier study in this folder may have left one that this study does not draw.
        (folder / f"{name}.svg").unlink(missing_ok=True)
        if figure is not None:
            drawn = svg_of(figure)
            images[name] = as_source(drawn)
            written.append(folder / f"{name}.svg")
            with writing("study", written[-1]):
                written[-1].write_text(drawn, encoding="utf-8")
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
