"""The report of a study: figures and one HTML file that can be mailed."""

from __future__ import annotations

import base64
import errno
import html
import json
import math
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from loops.record.files import STEPS, SUMMARY
from loops.record.log import read_log
from loops.study import texts
from loops.study.costs import COSTS, cost_cells, has_costs
from loops.study.marks import marks
from loops.study.page import PAGE, STYLE, sample
from loops.study.setups import SETUPS
from loops.study.summaries import Steps, failed, failure, options_of, place, runs_of, split_rows
from loops.support.drawing import require_matplotlib
from loops.support.text import share
from loops.support.written.place import writing

_CLOSE = 1.0  # Percentage points: what the first sentence calls "within" of float32.
_FAR = 5.0  # Percentage points below float32 that call for an explanation.
_NONE = "–"


def write_report(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Draws a study and writes `report.html` around the figures.

    Args:
        folder: What `run_study` wrote: `summary.json` and `runs/*/steps.jsonl`.

    Returns:
        The files written to `folder`: `comparison.png`, `loss.png`, `loss_scale.png`, `gradients.png`, `costs.png` if
        time or memory is known, `small_loss.png` if the study has set-ups with a small loss, and `report.html`, which
        needs no other file. Runs that failed are in them as far as they came.

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
    images = {path.stem: base64.b64encode(path.read_bytes()).decode("ascii") for path in written}
    written.append(folder / "report.html")
    with writing("study", written[-1]):
        written[-1].write_text(_page(summary, steps, images), encoding="utf-8")
    return written


def read_steps(folder: pathlib.Path, summary: Mapping) -> Steps:
    """The lines of each run, by its `folder`; none for a run that failed before its first step."""
    steps: dict[str, list[dict]] = {}
    for run in summary["runs"]:
        path = folder / run["folder"] / STEPS
        if "error" not in run and not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        steps[run["folder"]] = read_log(path)
    return steps


def result_sentence(summary: Mapping) -> str:
    """What came out, in one sentence made from the numbers."""
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
    others = [row for row in rows if _policy(summary, row) != "float32"]
    close = [row for row in others if abs(row["difference"]) <= _CLOSE]
    far = sorted((row for row in others if row not in close), key=_accuracy, reverse=True)
    parts = []
    if close:
        alone = len(close) == len(others)
        count = f"{len(close)} of {len(others)}" if not alone else "both" if len(others) == 2 else f"all {len(others)}"
        named = f"“{close[0]['title']}” is" if len(close) == 1 else f"{count} set-ups in 16 bits are"
        # Rounded up: "within" has to hold.
        widest = max(0.1, *(math.ceil(10 * abs(row["difference"]) - 1e-6) / 10 for row in close))
        parts.append(f"{named} within {widest:.1f} points of it")
    for row in far:
        side = "below" if row["difference"] < 0 else "above"
        parts.append(f"“{row['title']}” is {abs(row['difference']):.1f} points {side}")
    return "; ".join([sentence, *parts, *none]) + "."


def command(summary: Mapping) -> str:
    """The command that makes this study again."""
    names, known = [row["name"] for row in summary["setups"]], [setup.name for setup in SETUPS]
    strategies = [options_of(summary, row)["strategy"] for row in summary["setups"] if row["name"] not in known]
    chosen = [] if names == known else [f"--setup {name}" for name in names]
    if strategies:  # They come with float32.
        chosen = [f"--strategy {shlex.quote(strategy)}" for strategy in strategies]
    counts = [f"--steps {summary['steps']}", f"--seeds {summary['seeds']}"]
    return " ".join(["halfstep study", summary["task"], *counts, *chosen])


def _page(summary: Mapping, steps: Steps, images: Mapping[str, str]) -> str:
    title = f"Halfstep study: {summary['task']}"
    sections = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="result">{_text(result_sentence(summary))}</p>',
        *_failures(summary),
        _table(summary),
        *_figures(summary, steps, images),
        "<h2>How it was made</h2>",
        _made(summary),
    ]
    return PAGE.format(title=_text(title), style=STYLE, body="\n".join(sections))


def _table(summary: Mapping) -> str:
    heads = ("Accuracy", "Final loss", "Skipped", "Flushed, weights", "Flushed, activations", "vs float32")
    seeds = "One seed" if summary["seeds"] == 1 else f"Means over {summary['seeds']} seeds, with the lowest and highest"
    rows = _rows(summary, heads, [_cells(summary, row) for row in summary["setups"]])
    return f'{rows}\n<p class="note">{seeds}. {texts.TABLE}</p>'


def _rows(summary: Mapping, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    found = marks(summary)
    lines = ["".join(f'<th scope="col">{name}</th>' for name in ("Set-up", *heads))]
    for row, own in zip(summary["setups"], cells, strict=True):
        name = f'<th scope="row">{sample(found[row["name"]])}{_text(row["title"])}</th>'
        # On a narrow page each number stands below its heading.
        lines.append(
            name + "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in zip(heads, own, strict=True))
        )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>{body}</table></div>'


def _cells(summary: Mapping, row: Mapping) -> tuple[str, ...]:
    runs = runs_of(summary, row)
    broken = failed(runs)
    flushed = _share(row["flushed_weights"]), _share(row["flushed_activations"])
    if row["accuracy"] is None:
        return f"failed <small>{place(broken[0])}</small>", _NONE, _NONE, *flushed, _NONE
    skips = [run["skipped"] for run in runs if run not in broken]
    accuracy = _with_range(f"{row['accuracy']:.1%}", f"{row['accuracy_min']:.1%}", f"{row['accuracy_max']:.1%}")
    return (
        accuracy + (f" <small>{len(broken)} of {len(runs)} failed</small>" if broken else ""),
        "not finite" if row["final_loss"] is None else f"{row['final_loss']:.2g}",
        _with_range(f"{row['skipped']:.1f}".removesuffix(".0"), min(skips), max(skips)),
        *flushed,
        _NONE if row["difference"] is None or row["name"] == "float32" else _points(row["difference"]),
    )


def _failures(summary: Mapping) -> list[str]:
    lines = "".join(f"<li>{_text(failure(run))}</li>" for run in failed(summary["runs"]))
    return [f"<h2>What failed</h2>\n<p>{texts.FAILED}</p>\n<ul>{lines}</ul>"] if lines else []


def _figures(summary: Mapping, steps: Steps, images: Mapping[str, str]) -> list[str]:
    small = split_rows(summary)[1]
    sections = [
        _figure("Side by side", images["comparison"], "Accuracy, flushed shares and skips", texts.COMPARISON),
        *_costs(summary, images),
        _figure("Loss", images["loss"], "Loss over the steps, a panel for each set-up", *_loss_texts(summary, steps)),
        _figure("Loss scale", images["loss_scale"], "Loss scale over the steps", texts.LOSS_SCALE),
        _figure("Gradients in float16’s range", images["gradients"], "Histograms of gradient sizes", texts.GRADIENTS),
    ]
    if small:
        factors = dict.fromkeys(_factor(options_of(summary, row)["loss_factor"]) for row in small)
        said = texts.SMALL.format(" or ".join(factors)), *_small_notes(summary, small)
        sections.append(_figure("A small loss", images["small_loss"], "Loss and gradient sizes of a small loss", *said))
    return sections


def _costs(summary: Mapping, images: Mapping[str, str]) -> list[str]:
    if "costs" not in images:
        return []
    drawn = _figure("Time and memory", images["costs"], "Time, memory and energy of a step", texts.COSTS)
    return [drawn, _rows(summary, COSTS, [cost_cells(row) for row in summary["setups"]])]


def _figure(heading: str, image: str, alt: str, *said: str) -> str:
    paragraphs = "".join(f"<p>{text}</p>" for text in said)
    return (
        f'<h2>{heading}</h2>\n<figure><div class="wide card"><img alt="{_text(alt)}" '
        f'src="data:image/png;base64,{image}"></div>\n<figcaption>{paragraphs}</figcaption></figure>'
    )


def _loss_texts(summary: Mapping, steps: Steps) -> list[str]:
    notes = [texts.LOSS if summary["seeds"] == 1 else f"{texts.LOSS} {texts.SEEDS}"]
    for row in summary["setups"]:
        for run in runs_of(summary, row):
            lost = [record["step"] for record in steps[run["folder"]] if record["loss"] is None]
            if lost and "error" not in run:
                where = f"at {len(lost)} of {summary['steps']} steps, the first of them {lost[0]}"
                notes.append(f"Not finite: the loss of “{_text(row['title'])}”, seed {run['seed']}, {where}.")
    bare = next((row for row in summary["setups"] if row["name"] == "float16-none"), None)
    if bare and bare["difference"] is not None and bare["difference"] < -_FAR:
        notes.append(texts.NO_MASTERS)
    return notes


def _small_notes(summary: Mapping, small: Sequence[Mapping]) -> list[str]:
    lines = []
    for row in small:
        if row["flushed_activations"] is not None:
            flushed = f"{_share(row['flushed_activations'])} of the activations’ gradient values become zero"
            score = "no run finished" if row["accuracy"] is None else f"accuracy {row['accuracy']:.1%}"
            lines.append(f"“{_text(row['title'])}”: {flushed}, {score}.")
    return ["<br>".join(lines)] if lines else []


def _made(summary: Mapping) -> str:
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
    rows = "".join(f"<dt>{name}</dt><dd>{_text(fact)}</dd>" for name, fact in facts.items())
    return f"<dl>{rows}</dl>\n<pre>{_text(command(summary))}</pre>"


def _distinct(settings: Sequence[Mapping], name: str) -> str:
    words = {True: "yes", False: "no"}
    values = [setting[name] for setting in settings]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return ", ".join(dict.fromkeys(words[item] if isinstance(item, bool) else str(item) for item in flat))


def _factor(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    return f"2<sup>{exponent - 1}</sup>".replace("-", "−") if mantissa == 0.5 else f"{value:g}"


def _with_range(mean: str, low: object, high: object) -> str:
    return mean if low == high else f"{mean} <small>{low} to {high}</small>"


def _share(value: float | None) -> str:
    return _NONE if value is None else html.escape(share(value))


def _points(value: float) -> str:
    return "0.0" if abs(value) < 0.05 else f"{value:+.1f}".replace("-", "−")


def _accuracy(row: Mapping) -> float:
    return row["accuracy"]


def _policy(summary: Mapping, row: Mapping) -> str:
    return options_of(summary, row)["policy"]


def _text(value: object) -> str:
    return html.escape(str(value))
