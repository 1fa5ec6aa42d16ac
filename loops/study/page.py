"""Writes the report of a study: its figures, and its page with captions and the command that repeats it."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from loops.record.files import STEPS, SUMMARY
from loops.record.log import read_log
from loops.study.costs import COSTS, cost_cells, has_costs
from loops.study.setups import FURTHER, SETUPS, marks
from loops.study.summaries import Steps, constant_scale, failed, failure, options_of, place, runs_of, split_rows
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
_TABLE = Markup("""<b>Accuracy</b> is on held-out examples. <b>Skipped</b> counts the steps that were not applied
because the gradients were not finite. <b>Flushed</b> is the share of gradient values, not zero in float32, that float16
makes zero at the loss scale in use. <b>vs float32</b> is the difference in accuracy, in percentage points.""")
_COMPARISON = Markup("""A dot is the mean over the seeds, with a line from the lowest to the highest; the grey line is
float32. Shares are on a logarithmic axis. Below are the loss scales of all 16-bit set-ups, where one of them moves.""")
_COSTS = Markup("""Time is the median over the calls of a run but the first, in which the step is traced, with a line
from the lower to the upper quartile. The set-ups ran one after the other, so differences smaller than these lines mean
nothing. Operations were deterministic, which costs time. Memory is counted: weights, masters, slots of the
optimizer, gradients, and what the forward pass keeps for the backward pass. Energy is what the
machine's processors (RAPL) and GPUs (NVML) report for the same time, for everything that ran on it; a dash
means unknown.""")
_LOSS = Markup("""A panel is one set-up, with the range of float32 in grey where float32 was run: a set-up that trains
as float32 does keeps to the grey. The curves are moving means over a few steps, on a logarithmic axis.""")
_SEEDS = Markup("""The line is the mean over the seeds, the band reaches from the lowest seed to the highest; a bump in
one seed alone is variation from seed to seed.""")
_LOSS_SCALE = Markup("""A line is one run: the widest and palest is seed 0, and each further seed lies on it
thinner and stronger. A dynamic scale grows after a number of steps with finite gradients and backs off at one without:
that step is skipped (×) and leaves the weights as they were. A skipped step now and then is how the largest usable
scale is found; many in a row would mean that something else overflows.""")
_GRADIENTS = Markup("""A line is one set-up: its gradients of activations, and those of weights. Values are counted by
size, on one fixed batch at regular intervals of the run, in a float32 copy of the model, because float16 cannot show
what it loses; zeros are left out, and the outermost bins hold all values beyond. In float16, values on the left
become zero, subnormal values keep fewer bits the smaller they are, and values on the right become infinite.
Scaling the loss moves the whole histogram to the right, by log<sub>2</sub> of the scale; the gradients of activations
are what backpropagation hands from layer to layer, and those of weights are computed from them.""")
_SMALL = Markup("""Here the loss is multiplied by {}, as a term with a small weight would be, and Adam’s epsilon with
it, so that without rounding nothing would change. The gradients shrink by that factor, towards what float16 makes zero;
a loss scale moves them back before they are rounded.""")
_NO_MASTERS = Markup("""<b>What can happen without masters</b> (an explanation, measured on the digits, not in these
runs): after the first step, 18% of Adam’s second moments are 0 in float16 while the first moment is not. Only epsilon
is left to divide by, so with a learning rate of 0.01 those weights jump by 6.5 (median) and up to 14.5, where the
others move by 0.01.""")
_FAILED = Markup("""These runs ended with an error. No mean includes their numbers; the figures show them up to the
failure. “vs float32” and the first sentence are about those that finished.""")
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


class Picture(NamedTuple):
    """A figure of the page.

    Attributes:
        heading: The heading above the figure.
        image: Its source.
        alt: What it shows, in words.
        said: The paragraphs of its caption.
        costs: Whether the table of costs follows below.
        narrow: Whether it fits a phone.
    """

    heading: str
    image: str
    alt: str
    said: Sequence[str]
    costs: bool = False
    narrow: bool = False


def page(summary: Mapping, steps: Steps, images: Mapping[str, str]) -> str:
    """The page of a study.

    Args:
        summary: The study's `summary.json`.
        steps: The steps of its runs.
        images: The sources of its figures by name.
    """
    rows, found = summary["setups"], marks(summary)
    seeds = "One seed" if summary["seeds"] == 1 else f"Means over {summary['seeds']} seeds, with the lowest and highest"
    return render(
        __package__,
        "page.html",
        title=f"Halfstep study: {summary['task']}",
        sentence=result_sentence(summary),
        failures=[failure(run) for run in failed(summary["runs"])],
        texts={"FAILED": _FAILED, "TABLE": _TABLE},
        results=Table(("Set-up", *_HEADS), [(row["title"], *_cells(summary, row)) for row in rows]),
        seeds=seeds,
        samples=[_sample(found[row["name"]]) for row in rows],
        pictures=list(_pictures(summary, steps, images)),
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


def _pictures(summary: Mapping, steps: Steps, images: Mapping[str, str]) -> Iterator[Picture]:
    yield Picture("Side by side", images["comparison"], "Accuracy, flushed shares and skips", [_COMPARISON])
    if "costs" in images:
        alt = "Time, memory and energy of a step"
        yield Picture("Time and memory", images["costs"], alt, [_COSTS], costs=True)
    alt = "Loss over the steps, a panel for each set-up"
    yield Picture("Loss", images["loss"], alt, _loss_texts(summary, steps))
    if "loss_scale" in images:
        said = [_LOSS_SCALE, *_constant_notes(summary, steps)]
        yield Picture("Loss scale", images["loss_scale"], "Loss scale over the steps", said)
    alt = "Histograms of gradient sizes"
    yield Picture("Gradients in float16’s range", images["gradients"], alt, [_GRADIENTS])
    if small := split_rows(summary)[1]:
        factors = dict.fromkeys(_factor(options_of(summary, row)["loss_factor"]) for row in small)
        said = [_SMALL.format(Markup(" or ").join(factors)), *_small_notes(summary, small)]
        yield Picture(
            "A small loss", images["small_loss"], "Loss and gradient sizes of a small loss", said, narrow=True
        )


def _loss_texts(summary: Mapping, steps: Steps) -> list[str]:
    notes: list[str] = [_LOSS if summary["seeds"] == 1 else _LOSS + " " + _SEEDS]
    for row in summary["setups"]:
        for run in runs_of(summary, row):
            lost = [record["step"] for record in steps[run["folder"]] if record["loss"] is None]
            if lost and "error" not in run:
                where = f"at {len(lost)} of {summary['steps']} steps, the first of them {lost[0]}"
                notes.append(f"Not finite: the loss of “{row['title']}”, seed {run['seed']}, {where}.")
    bare = next((row for row in summary["setups"] if row["name"] == "float16-none"), None)
    if bare and bare["difference"] is not None and bare["difference"] < -_FAR:
        notes.append(_NO_MASTERS)
    return notes


def _constant_notes(summary: Mapping, steps: Steps) -> list[str]:
    narrow = [row for row in summary["setups"] if options_of(summary, row)["policy"] != "float32"]
    scales = {row["title"]: constant_scale(summary, steps, row) for row in narrow}
    said = [Markup("“{}” at {}").format(title, _factor(scale)) for title, scale in scales.items() if scale is not None]
    return [Markup("Constant, and not drawn: {}.").format(Markup(", ").join(said))] if said else []


def _small_notes(summary: Mapping, small: Sequence[Mapping]) -> list[str]:
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
