"""Writes the report of a study: its figures, and its page with captions and the command that repeats it."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from loops.record.files import STEPS, SUMMARY
from loops.record.log import read_columns
from loops.record.steps import NO_STEPS, Steps
from loops.study.measured import COSTS, cost_cells, has_costs
from loops.study.setups import (
    FURTHER,
    SETUPS,
    StepsOf,
    constant_scale,
    failed,
    failure,
    marks,
    options_of,
    place,
    runs_of,
    split_rows,
)
from loops.support.drawing import as_source, colour_variable, dark_variables, require_matplotlib, svg_of
from loops.support.errors import LoopError
from loops.support.pages import Table, render
from loops.support.palette import BLACK, Mark
from loops.support.text import share
from loops.support.written import writing

_FAR = 5.0  # Percentage points below float32 that call for an explanation.
_NONE = "–"
_HEADS = ("Accuracy", "Final loss", "Skipped", "Flushed, weights", "Flushed, activations", "vs float32")
# SVG paths of markers, by matplotlib's names: around (0, 0), about 8 wide.
_SHAPES = {
    "o": "M-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0",
    "s": "M-3.5,-3.5 h7 v7 h-7 z",
    "^": "M-4.2,3.5 h8.4 l-4.2,-7.5 z",
    "v": "M-4.2,-3.5 h8.4 l-4.2,7.5 z",
    "D": "M0,-4.6 l4.6,4.6 l-4.6,4.6 l-4.6,-4.6 z",
    "X": "M-4,-4 h2.6 l1.4,1.6 l1.4,-1.6 h2.6 l-2.4,4 l2.4,4 h-2.6 l-1.4,-1.6 l-1.4,1.6 h-2.6 l2.4,-4 z",
    "P": "M-1.4,-4.2 h2.8 v2.8 h2.8 v2.8 h-2.8 v2.8 h-2.8 v-2.8 h-2.8 v-2.8 h2.8 z",
}
_CLOSE = 1.0  # Percentage points that count as "within" of float32.


class Sample(NamedTuple):
    """A set-up's line and marker as in the figures, as SVG draws them.

    Attributes:
        tint: The colour of both, as CSS has it.
        dashes: The dash array of the line.
        shape: The path of the marker.
    """

    tint: str
    dashes: str
    shape: str


def page(summary: Mapping, steps: StepsOf, images: Mapping[str, str]) -> str:
    """The page of a study.

    Args:
        summary: The study's `summary.json`.
        steps: The steps of its runs.
        images: The sources of its figures by name.
    """
    rows, found, small = summary["setups"], marks(summary), split_rows(summary)[1]
    factors = dict.fromkeys(_factor(options_of(summary, row)["loss_factor"]) for row in small)
    return render(
        __package__,
        "page.html",
        title=f"Halfstep study: {summary['task']}",
        sentence=result_sentence(summary),
        failures=[failure(run) for run in failed(summary["runs"])],
        results=Table(("Set-up", *_HEADS), [(row["title"], *_cells(summary, row)) for row in rows]),
        seeds=summary["seeds"],
        samples=[_sample(found[row["name"]]) for row in rows],
        images=images,
        not_finite=_not_finite(summary, steps),
        without_masters=any(row["name"] == "float16-none" and (row["difference"] or 0) < -_FAR for row in rows),
        constant=_constant_notes(summary, steps),
        factors=Markup(" or ").join(factors),
        small=_small_notes(small),
        costs=Table(("Set-up", *COSTS), [(row["title"], *cost_cells(row)) for row in rows]),
        on_dark=dark_variables(),
        facts=_facts(summary),
        commands=command(summary),
    )


def _sample(mark: Mark) -> Sample:
    # Black stands for the page's text colour, which a dark page changes.
    tint = "currentColor" if mark.colour == BLACK else colour_variable(mark.colour)
    return Sample(tint, " ".join(f"{1.5 * length:g}" for length in mark.dashes) or "none", _SHAPES[mark.marker])


def _cells(summary: Mapping, row: Mapping) -> tuple[str, ...]:
    runs = runs_of(summary, row)
    broken = failed(runs)
    flushed = _share(row["flushed_weights"]), _share(row["flushed_activations"])
    if row["accuracy"] is None:
        return Markup("failed <small>{}</small>").format(place(broken[0])), _NONE, _NONE, *flushed, _NONE
    skips = [run["skipped"] for run in runs if run not in broken]
    accuracy = _with_range(f"{row['accuracy']:.1%}", f"{row['accuracy_min']:.1%}", f"{row['accuracy_max']:.1%}")
    return (
        accuracy + (Markup(" <small>{} of {} failed</small>").format(len(broken), len(runs)) if broken else ""),
        "not finite" if row["final_loss"] is None else f"{row['final_loss']:.2g}",
        _with_range(f"{row['skipped']:.1f}".removesuffix(".0"), min(skips), max(skips)),
        *flushed,
        _NONE if row["difference"] is None or row["name"] == "float32" else _points(row["difference"]),
    )


def _not_finite(summary: Mapping, steps: StepsOf) -> list[str]:
    notes = []
    for row in summary["setups"]:
        for run in runs_of(summary, row):
            log = steps[run["folder"]]
            lost = log.step[np.isnan(log.column("loss"))]
            if len(lost) and "error" not in run:
                where = f"at {len(lost)} of {summary['steps']} steps, the first of them {lost[0]}"
                notes.append(f"Not finite: the loss of “{row['title']}”, seed {run['seed']}, {where}.")
    return notes


def _constant_notes(summary: Mapping, steps: StepsOf) -> list[str]:
    narrow = [row for row in summary["setups"] if options_of(summary, row)["policy"] != "float32"]
    scales = {row["title"]: constant_scale(summary, steps, row) for row in narrow}
    said = [Markup("“{}” at {}").format(title, _factor(scale)) for title, scale in scales.items() if scale is not None]
    return [Markup("Constant, and not drawn: {}.").format(Markup(", ").join(said))] if said else []


def _small_notes(small: Sequence[Mapping]) -> list[str]:
    lines = []
    for row in small:
        if row["flushed_activations"] is not None:
            flushed = f"{_share(row['flushed_activations'])} of the activations’ gradient values become zero"
            score = "no run finished" if row["accuracy"] is None else f"accuracy {row['accuracy']:.1%}"
            lines.append(f"“{row['title']}”: {flushed}, {score}.")
    return [Markup("<br>").join(lines)] if lines else []


def _facts(summary: Mapping) -> list[tuple[str, str]]:
    runs = summary["runs"]
    settings = [run["digest_depends_on"] for run in runs if "digest_depends_on" in run]
    facts = {
        "Task": summary["task"],
        "Runs": f"{len(runs)}, of {summary['steps']} steps each; {summary['seeds']} for each set-up, seeds from 0",
        "Optimizer": f"Adam, learning rate {_distinct(runs, 'learning_rate')}",
        "Batches": f"{_distinct(runs, 'batch_size')} examples",
        "Versions": f"TensorFlow {_distinct(settings, 'tensorflow')}, Keras {_distinct(settings, 'keras')}",
        "Devices": _distinct(settings, "devices"),
        "Threads": f"{_distinct(settings, 'intra_op_threads')} within an operation, "
        f"{_distinct(settings, 'inter_op_threads')} between operations",
        "Determinism": f"deterministic operations: {_distinct(settings, 'op_determinism')}; "
        f"XLA: {_distinct(settings, 'jit_compile')}. Runs that agree in all of the above on one machine end with the "
        "same weights; each run’s summary.json has their digest.",
    }
    return list(facts.items())


def _distinct(settings: Sequence[Mapping], name: str) -> str:
    words = {True: "yes", False: "no"}
    values = [setting[name] for setting in settings]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return ", ".join(dict.fromkeys(words[item] if isinstance(item, bool) else str(item) for item in flat))


def _factor(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5 or value == 1:
        return f"{value:g}"
    return Markup("2<sup>{}</sup>").format(f"{exponent - 1}".replace("-", "−"))


def _with_range(mean: str, low: object, high: object) -> str:
    return mean if low == high else Markup("{} <small>{} to {}</small>").format(mean, low, high)


def _share(value: float | None) -> str:
    return _NONE if value is None else share(value)


def _points(value: float) -> str:
    return "0.0" if abs(value) < 0.05 else f"{value:+.1f}".replace("-", "−")


def result_sentence(summary: Mapping) -> str:
    """The result in one sentence, made from the numbers."""
    rows = [row for row in summary["setups"] if row["accuracy"] is not None]
    lost = [row for row in summary["setups"] if row["accuracy"] is None]
    none = [f"no run of “{row['title']}” finished" for row in lost]
    if not rows:
        return f"No run on {summary['task']} finished."
    runs = "one seed" if summary["seeds"] == 1 else f"mean of {summary['seeds']} seeds"
    reference = next((row for row in rows if row["name"] == "float32"), None)
    if reference is None:
        best, worst = max(rows, key=_accuracy), min(rows, key=_accuracy)
        sentence = f"{best['title']} reaches {_accuracy(best):.1%} accuracy on {summary['task']} ({runs})"
        sentence += f", {worst['title']} {_accuracy(worst):.1%}" if worst is not best else ""
        return "; ".join([sentence, *none]) + "."
    sentence = f"float32 reaches {_accuracy(reference):.1%} accuracy on {summary['task']} ({runs})"
    others = [row for row in rows if _is_narrow(options_of(summary, row))]
    close = [row for row in others if abs(row["difference"]) <= _CLOSE]
    far = sorted((row for row in others if row not in close), key=_accuracy, reverse=True)
    parts = []
    if close:
        alone = len(close) == len(others)
        count = f"{len(close)} of {len(others)}" if not alone else "both" if len(others) == 2 else f"all {len(others)}"
        named = (
            f"“{close[0]['title']}” is" if len(close) == 1 else f"{count} set-ups in {_width(summary, close)} bits are"
        )
        # Rounded up, so that "within" holds.
        widest = max(0.1, *(math.ceil(10 * abs(row["difference"]) - 1e-6) / 10 for row in close))
        parts.append(f"{named} within {widest:.1f} points of it")
    for row in far:
        side = "below" if row["difference"] < 0 else "above"
        parts.append(f"“{row['title']}” is {abs(row['difference']):.1f} points {side}")
    return "; ".join([sentence, *parts, *none]) + "."


def command(summary: Mapping) -> str:
    """The command that repeats this study."""
    names, known = [row["name"] for row in summary["setups"]], [setup.name for setup in (*SETUPS, *FURTHER)]
    strategies = [options_of(summary, row)["strategy"] for row in summary["setups"] if row["name"] not in known]
    chosen = [] if names == [setup.name for setup in SETUPS] else [f"--setup {name}" for name in names]
    if strategies:  # They come with float32.
        chosen = [f"--strategy {shlex.quote(strategy)}" for strategy in strategies]
    counts = [f"--steps {summary['steps']}", f"--seeds {summary['seeds']}"]
    return " ".join(["halfstep lab study", summary["task"], *counts, *chosen])


def _accuracy(row: Mapping) -> float:
    return row["accuracy"]


def _is_narrow(options: Mapping) -> bool:
    return options["policy"] != "float32" or options["emulated"] is not None


def _width(summary: Mapping, rows: Sequence[Mapping]) -> str:
    return "16 or fewer" if any(options_of(summary, row)["emulated"] for row in rows) else "16"


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
    from loops.study import figures

    folder = pathlib.Path(folder)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    steps = read_steps(folder, summary)
    drawings = {
        "comparison": figures.comparison_figure(summary, steps),
        "loss": figures.loss_figure(summary, steps),
        "loss_scale": figures.loss_scale_figure(summary, steps),
        "gradients": figures.gradients_figure(summary),
        "costs": figures.costs_figure(summary) if has_costs(summary) else None,
        "small_loss": figures.small_loss_figure(summary, steps) if split_rows(summary)[1] else None,
    }
    written, images = [], {}
    for name, figure in drawings.items():
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


def read_steps(folder: pathlib.Path, summary: Mapping) -> StepsOf:
    """The steps of each run, by its `folder`; none for a run that failed before its first step.

    Raises:
        FileNotFoundError: If the steps of a run that finished are missing.
        LoopError: If a run's folder does not lie in that of the study.
    """
    steps: dict[str, Steps] = {}
    for run in summary["runs"]:
        path = folder / run["folder"] / STEPS
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LoopError(f"{folder / SUMMARY}: its run {run['folder']!r} lies outside of the study's folder.")
        if "error" not in run and not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        steps[run["folder"]] = read_columns(path) if path.exists() else NO_STEPS
    return steps
