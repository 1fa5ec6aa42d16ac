"""The result of a study in one sentence, and the command that repeats the study."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from loops.study.setups import FURTHER, SETUPS
from loops.study.summaries import options_of

_CLOSE = 1.0  # Percentage points that count as "within" of float32.


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
    return " ".join(["halfstep study", summary["task"], *counts, *chosen])


def _accuracy(row: Mapping) -> float:
    return row["accuracy"]


def _is_narrow(options: Mapping) -> bool:
    return options["policy"] != "float32" or "emulated" in options


def _width(summary: Mapping, rows: Sequence[Mapping]) -> str:
    return "16 or fewer" if any("emulated" in options_of(summary, row) for row in rows) else "16"
