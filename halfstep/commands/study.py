"""`halfstep lab study`: compares set-ups, with a report."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from halfstep.commands.shared import (
    EMULATED,
    EXIT_ERROR,
    EXIT_SOME_FAILED,
    FORMS,
    IMAGE_TASKS,
    SETUPS,
    UNIT_SCALED,
    count,
)

STEPS = 400
"""Steps of a run without --steps."""
SEEDS = 3
"""Runs of a set-up without --seeds."""
_CAPTION = (
    "means over seeds; zero: share of non-zero gradients of weights (w) and activations (a) that float16 makes zero at "
    "the loss scale in use"
)

_COSTS = (
    "medians, with the quartiles of the time; the set-ups ran one after the other. MB: memory of a step. J: energy of "
    "the whole machine, where it can be read"
)


def add_study(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "study",
        help="compare precisions and scalings on a task, with a report",
        description="Trains each set-up with several seeds, one run after the other. With the defaults these are "
        f"{len(SETUPS) * SEEDS} runs of {STEPS} batches, which take a minute or two on two cores of a CPU, and ten "
        "times as long where oneDNN is slow in float16 (TF_ENABLE_ONEDNN_OPTS=0 turns it off). After "
        "the first run of each set-up a line says how long all of them take.",
        epilog="A run that fails, for example because its scaler is stuck, does not end the others: the report says "
        "which failed, where and why. Exit status: 0 if all runs finished, "
        f"{EXIT_SOME_FAILED} if some failed, {EXIT_ERROR} if none of what was compared finished, or if "
        "nothing could be written.",
    )
    parser.add_argument(
        "task",
        nargs="?",
        default="digits",
        metavar="TASK",
        help=f"{' or '.join(IMAGE_TASKS)}, the tasks of images (default: digits)",
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="NAME",
        help=f"one of {', '.join(SETUPS)} (default: all of these), or {', '.join(EMULATED)}, whose products round to "
        f"an emulated format, or {', '.join(UNIT_SCALED)}, whose model is unit-scaled; may be given several times",
    )
    compared.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="compare strategies instead of set-ups, in mixed float16, against float32; may be given several times: "
        + FORMS,
    )
    parser.add_argument("--steps", type=count, default=STEPS, help="batches a run (default: %(default)s)")
    parser.add_argument("--seeds", type=count, default=SEEDS, help="runs a set-up (default: %(default)s)")
    parser.add_argument("--out", default="study", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_study)


def _study(options: argparse.Namespace) -> int:
    import scaler
    from halfstep.terminal import folded, progress, width
    from loops import tasks
    from loops.record.files import to_json
    from loops.study.compare import run_study
    from loops.study.measured import has_costs
    from loops.study.page import report_study
    from loops.study.setups import choose_setups, failed, failure, strategy_setups
    from loops.support.drawing import require_matplotlib
    from loops.support.text import columns

    require_matplotlib()
    setups = strategy_setups(options.strategy) if options.strategy else choose_setups(options.setup)
    if options.task not in tasks.IMAGE_TASKS:
        raise scaler.InvalidArgument(
            f"study {options.task!r}: expected one of {', '.join(tasks.IMAGE_TASKS)}. A study measures the gradients "
            "of images; train other tasks one by one with halfstep train."
        )
    task = tasks.load(options.task)
    summary = run_study(
        task,
        setups,
        steps=options.steps,
        seeds=options.seeds,
        out=options.out,
        progress=progress,
        say=lambda text: print(text, file=sys.stderr),
    )
    written = report_study(pathlib.Path(options.out))
    if options.json:
        print(to_json(summary))
    else:
        print(columns(rows(summary), width()), folded(_CAPTION), sep="\n\n", end="\n\n")
        if has_costs(summary):
            print(columns(cost_rows(summary), width()), folded(_COSTS), sep="\n\n", end="\n\n")
        print(f"wrote {', '.join(str(path) for path in written)}")
    for run in failed(summary.get("runs", ())):
        print(f"halfstep: {failure(run)}", file=sys.stderr)
    return exit_status(summary)


def exit_status(summary: Mapping) -> int:
    """The exit status: 0 if all runs finished, 3 if some failed, 1 if no candidate finished.

    float32 is the reference of a comparison of strategies, not a candidate.
    """
    from loops.study.setups import SETUPS, failed

    runs = summary.get("runs", ())
    if not failed(runs):
        return 0
    finished = {run["setup"] for run in runs if "error" not in run}
    return EXIT_SOME_FAILED if finished - {SETUPS[0].name} else EXIT_ERROR


def rows(summary: dict) -> list[tuple[str, ...]]:
    """The cells of a study's table, the headings first."""
    return [
        ("set-up", "accuracy", "vs f32", "loss", "skipped", "zero w", "zero a"),
        *(
            (row["name"], *_results(row), _share(row["flushed_weights"]), _share(row["flushed_activations"]))
            for row in summary["setups"]
        ),
    ]


def cost_rows(summary: dict) -> list[tuple[str, ...]]:
    """The cells of the table of what the set-ups cost, the headings first."""
    from loops.study.measured import COSTS, cost_cells

    found: list[tuple[str, ...]] = [("set-up", "ms/step", "quartiles", *COSTS[1:])]
    for row in summary["setups"]:
        milliseconds, *others = cost_cells(row)
        known = row.get("milliseconds") is not None
        quartiles = f"{row['milliseconds_low']:.3g} to {row['milliseconds_high']:.3g}" if known else "–"
        found.append((row["name"], milliseconds, quartiles, *others))
    return found


def _results(row: Mapping) -> tuple[str, str, str, str]:
    if row["accuracy"] is None:
        return "failed", "–", "–", "–"
    note = f" ({row['failed']} failed)" if row["failed"] else ""
    difference = "–" if row["difference"] is None else f"{row['difference']:+.1f}"
    return f"{row['accuracy']:.1%}{note}", difference, f"{row['final_loss']:.1e}", f"{row['skipped']:.1f}"


def _share(value: float | None) -> str:
    from loops.support.text import share

    return "–" if value is None else share(value)
