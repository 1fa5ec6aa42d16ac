"""The report of a study: figures and one HTML file that can be mailed."""

from __future__ import annotations

import base64
import html
import json
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from loops.study import plots
from loops.study.setups import SETUPS

_CLOSE = 1.0  # Percentage points: what the first sentence calls "within" of float32.
_FAR = 5.0  # Percentage points below float32 that call for an explanation.
_NONE = "–"


def write_report(folder) -> list[pathlib.Path]:
    """Draws a study and writes `report.html` around the figures.

    Args:
        folder: What `run_study` wrote: `summary.json` and `runs/*/steps.jsonl`.

    Returns:
        The files written to `folder`: `loss.png`, `loss_scale.png`, `gradients.png`, `small_loss.png` if the study has
        set-ups with a small loss, and `report.html`, which needs no other file.

    Raises:
        loops.LoopError: If matplotlib is not installed.
        OSError: If a file of the study is missing, or one of the report cannot be written.
    """
    folder = pathlib.Path(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    steps = {run["folder"]: _read_steps(folder / run["folder"] / "steps.jsonl") for run in summary["runs"]}
    figures = {
        "loss": plots.loss_figure(summary, steps),
        "loss_scale": plots.loss_scale_figure(summary, steps),
        "gradients": plots.gradients_figure(summary),
    }
    # An earlier study in this folder may have left one.
    (folder / "small_loss.png").unlink(missing_ok=True)
    if plots.split_rows(summary)[1]:
        figures["small_loss"] = plots.small_loss_figure(summary, steps)
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=200, facecolor="white")
    images = {path.stem: base64.b64encode(path.read_bytes()).decode("ascii") for path in written}
    written.append(folder / "report.html")
    written[-1].write_text(_page(summary, steps, images), encoding="utf-8")
    return written


def result_sentence(summary: Mapping) -> str:
    """What came out, in one sentence made from the numbers."""
    rows = summary["setups"]
    runs = "one seed" if summary["seeds"] == 1 else f"mean of {summary['seeds']} seeds"
    reference = next((row for row in rows if row["name"] == "float32"), None)
    if reference is None:
        best, worst = max(rows, key=_accuracy), min(rows, key=_accuracy)
        sentence = f"{best['title']} reaches {_accuracy(best):.1%} accuracy on {summary['task']} ({runs})"
        return sentence + (f", {worst['title']} {_accuracy(worst):.1%}." if worst is not best else ".")
    sentence = f"float32 reaches {_accuracy(reference):.1%} accuracy on {summary['task']} ({runs})"
    others = [row for row in rows if _policy(summary, row) != "float32"]
    close = [row for row in others if abs(row["difference"]) <= _CLOSE]
    far = sorted((row for row in others if row not in close), key=_accuracy, reverse=True)
    parts = []
    if close:
        count = f"{len(close)} of {len(others)}" if far else "both" if len(others) == 2 else f"all {len(others)}"
        named = f"“{close[0]['title']}” is" if len(close) == 1 else f"{count} set-ups in 16 bits are"
        # Rounded up: "within" has to hold.
        widest = max(0.1, *(math.ceil(10 * abs(row["difference"]) - 1e-6) / 10 for row in close))
        parts.append(f"{named} within {widest:.1f} points of it")
    for row in far:
        side = "below" if row["difference"] < 0 else "above"
        parts.append(f"“{row['title']}” is {abs(row['difference']):.1f} points {side}")
    return "; ".join([sentence, *parts]) + "."


def command(summary: Mapping) -> str:
    """The command that makes this study again."""
    names, known = [row["name"] for row in summary["setups"]], [setup.name for setup in SETUPS]
    strategies = [plots.runs_of(summary, row)[0]["strategy"] for row in summary["setups"] if row["name"] not in known]
    chosen = [] if names == known else [f"--setup {name}" for name in names]
    if strategies:  # They come with float32.
        chosen = [f"--strategy {shlex.quote(strategy)}" for strategy in strategies]
    counts = [f"--steps {summary['steps']}", f"--seeds {summary['seeds']}"]
    return " ".join(["halfstep study", summary["task"], *counts, *chosen])


def _page(summary: Mapping, steps: plots.Steps, images: Mapping[str, str]) -> str:
    title = f"Halfstep study: {summary['task']}"
    sections = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="result">{_text(result_sentence(summary))}</p>',
        _table(summary),
        *_figures(summary, steps, images),
        "<h2>How it was made</h2>",
        _made(summary),
    ]
    return _PAGE.format(title=_text(title), style=_STYLE, body="\n".join(sections))


def _table(summary: Mapping) -> str:
    headings = ("Set-up", "Accuracy", "Final loss", "Skipped", "Flushed, weights", "Flushed, activations", "vs float32")
    lines = ["".join(f'<th scope="col">{heading}</th>' for heading in headings)]
    for row in summary["setups"]:
        skips = [run["skipped"] for run in plots.runs_of(summary, row)]
        cells = (
            _with_range(f"{row['accuracy']:.1%}", f"{row['accuracy_min']:.1%}", f"{row['accuracy_max']:.1%}"),
            "not finite" if row["final_loss"] is None else f"{row['final_loss']:.2g}",
            _with_range(f"{row['skipped']:.1f}".removesuffix(".0"), min(skips), max(skips)),
            _share(row["flushed_weights"]),
            _share(row["flushed_activations"]),
            _NONE if row["difference"] is None or row["name"] == "float32" else _points(row["difference"]),
        )
        dot = f'<span class="dot" style="background:{plots.colour(row["name"])}"></span>'
        name = f'<th scope="row">{dot}{_text(row["title"])}</th>'
        lines.append(name + "".join(f"<td>{cell}</td>" for cell in cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    seeds = "One seed" if summary["seeds"] == 1 else f"Means over {summary['seeds']} seeds, with the lowest and highest"
    return f'<div class="wide"><table>{body}</table></div>\n<p class="note">{seeds}. {_TABLE}</p>'


def _figures(summary: Mapping, steps: plots.Steps, images: Mapping[str, str]) -> list[str]:
    small = plots.split_rows(summary)[1]
    sections = [
        _figure("Loss", images["loss"], "Loss over the steps, a panel for each set-up", *_loss_texts(summary, steps)),
        _figure("Loss scale", images["loss_scale"], "Loss scale over the steps", _LOSS_SCALE),
        _figure("Gradients in float16’s range", images["gradients"], "Histograms of gradient sizes", _GRADIENTS),
    ]
    if small:
        factors = dict.fromkeys(_factor(plots.runs_of(summary, row)[0]["loss_factor"]) for row in small)
        texts = _SMALL.format(" or ".join(factors)), *_small_notes(summary, small)
        sections.append(
            _figure("A small loss", images["small_loss"], "Loss and gradient sizes of a small loss", *texts)
        )
    return sections


def _figure(heading: str, image: str, alt: str, *texts: str) -> str:
    paragraphs = "".join(f"<p>{text}</p>" for text in texts)
    return (
        f'<h2>{heading}</h2>\n<figure><div class="wide card"><img alt="{_text(alt)}" '
        f'src="data:image/png;base64,{image}"></div>\n<figcaption>{paragraphs}</figcaption></figure>'
    )


def _loss_texts(summary: Mapping, steps: plots.Steps) -> list[str]:
    notes = [_LOSS if summary["seeds"] == 1 else f"{_LOSS} {_SEEDS}"]
    for row in summary["setups"]:
        for run in plots.runs_of(summary, row):
            lost = [record["step"] for record in steps[run["folder"]] if record["loss"] is None]
            if lost:
                where = f"at {len(lost)} of {summary['steps']} steps, the first of them {lost[0]}"
                notes.append(f"Not finite: the loss of “{_text(row['title'])}”, seed {run['seed']}, {where}.")
    bare = next((row for row in summary["setups"] if row["name"] == "float16-none"), None)
    if bare and bare["difference"] is not None and bare["difference"] < -_FAR:
        notes.append(_NO_MASTERS)
    return notes


def _small_notes(summary: Mapping, small: Sequence[Mapping]) -> list[str]:
    lines = []
    for row in small:
        if row["flushed_activations"] is not None:
            flushed = f"{_share(row['flushed_activations'])} of the activations’ gradient values become zero"
            lines.append(f"“{_text(row['title'])}”: {flushed}, accuracy {row['accuracy']:.1%}.")
    return ["<br>".join(lines)] if lines else []


def _made(summary: Mapping) -> str:
    runs = summary["runs"]
    settings = [run["digest_depends_on"] for run in runs]
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


def _with_range(mean: str, low, high) -> str:
    return mean if low == high else f"{mean} <small>{low} to {high}</small>"


def _share(value: float | None) -> str:
    return _NONE if value is None else html.escape(plots.share(value))


def _points(value: float) -> str:
    return "0.0" if abs(value) < 0.05 else f"{value:+.1f}".replace("-", "−")


def _accuracy(row: Mapping) -> float:
    return row["accuracy"]


def _policy(summary: Mapping, row: Mapping) -> str:
    return plots.runs_of(summary, row)[0]["policy"]


def _read_steps(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _text(value) -> str:
    return html.escape(str(value))


_TABLE = """<b>Accuracy</b> is on held-out examples. <b>Skipped</b> counts the steps that were not applied because the
gradients were not finite. <b>Flushed</b> is the share of gradient values, not zero in float32, that float16 makes zero
at the loss scale in use. <b>vs float32</b> is the difference in accuracy, in percentage points."""
_LOSS = """A panel is one set-up, with the range of float32 in grey where float32 was run: a set-up that trains as
float32 does keeps to the grey. The curves are moving means over a few steps, on a logarithmic axis."""
_SEEDS = """The line is the mean over the seeds, the band reaches from the lowest seed to the highest; a bump in one
seed alone is variation from seed to seed."""
_LOSS_SCALE = """A line is one run; runs with the same scale lie on each other. A dynamic scale grows after a number of
steps with finite gradients and backs off at one without: that step is skipped (×) and leaves the weights as they were.
A skipped step now and then is how the largest usable scale is found; many in a row would mean that something else
overflows."""
_GRADIENTS = """Gradient values by size, on one fixed batch at regular intervals of the run, in a float32 copy of the
model, because float16 cannot show what it loses; zeros are left out, and the outermost bins hold all that lies beyond.
In float16, what lies on the left becomes zero, subnormal values keep fewer bits the smaller they are, and what lies on
the right becomes infinite. Scaling the loss moves the whole histogram to the right, by log<sub>2</sub> of the scale;
the gradients of activations are what backpropagation hands from layer to layer, and those of weights are computed from
them."""
_SMALL = """Here the loss is multiplied by {}, as a term with a small weight would be, and Adam’s epsilon with it, so
that without rounding nothing would change. The gradients shrink by that factor, towards what float16 makes zero; a
loss scale moves them back before they are rounded."""
_NO_MASTERS = """<b>What can happen without masters</b> (an explanation, measured on the digits, not in these runs):
after the first step, 18% of Adam’s second moments are 0 in float16 while the first moment is not. Only epsilon is left
to divide by, so with a learning rate of 0.01 those weights jump by 6.5 (median) and up to 14.5, where the others move
by 0.01."""
_STYLE = """
:root { color-scheme: light dark; --text: #1d1f21; --soft: #5c6166; --line: #d9dcdf; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e8; --soft: #a3a9af; --line: #3b4045; --page: #17191b; } }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 900px; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
.result { font-size: 1.15rem; margin: 0 0 1.5rem; }
.wide { overflow-x: auto; } .card { background: #fff; border-radius: 6px; } figure { margin: 0; }
img { display: block; width: 100%; min-width: 620px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; line-height: 1.3; }
th, td { padding: .45rem 0 .45rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th, td { vertical-align: baseline; }
th:first-child { width: 38%; min-width: 9.5rem; padding-left: 1.2em; text-indent: -1.2em; text-align: left; }
th[scope=row] { font-weight: 400; } sub, sup { line-height: 0; }
small { display: block; color: var(--soft); white-space: nowrap; }
.dot { display: inline-block; width: .7em; height: .7em; margin-right: .5em; border-radius: 50%; }
.dot { box-sizing: border-box; border: 1px solid var(--soft); }
.note, figcaption { color: var(--soft); font-size: .95rem; } .note, figcaption p { margin: .7rem 0 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; }
pre { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap; }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
