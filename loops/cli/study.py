"""`halfstep study`: set-ups compared, with a report."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import rich.box
import rich.console
import rich.table

import scaler
from loops import tasks
from loops.actions import Progress
from loops.cli import effects, options
from loops.effects import PRESETS
from loops.runs.run import to_json
from loops.runs.strategy_text import FORMS
from loops.study.compare import run_study
from loops.study.setups import SETUPS, choose_setups, strategy_setups
from loops.study.summaries import failed, failure, share

EXIT_ALL_FAILED = 1
EXIT_SOME_FAILED = 3
_STEPS = 400


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "study",
        help="compare precisions and scalings on a task, with a report",
        epilog="A run that fails, as one whose scaler is stuck does, does not end the others: the report says which "
        "failed, where and why. Exit status: 0 if all runs finished, "
        f"{EXIT_SOME_FAILED} if some failed, {EXIT_ALL_FAILED} if none of what was compared finished, or if nothing "
        "could be written.",
    )
    parser.add_argument(
        "task",
        nargs="?",
        default="digits",
        metavar="TASK",
        help=f"{' or '.join(tasks.IMAGE_TASKS)}, the tasks of images (default: digits)",
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="NAME",
        help=f"one of {', '.join(setup.name for setup in SETUPS)}; may be given several times (default: all)",
    )
    compared.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="compare strategies in place of set-ups, on mixed float16 and beside float32; may be given several times: "
        + FORMS,
    )
    compared.add_argument(
        "--preset",
        metavar="NAME",
        help=f"measure a published effect in place of a comparison, one of {', '.join(each.name for each in PRESETS)}; "
        "or list, which shows them, or all. Writes NAME.md, NAME.json and NAME.png",
    )
    parser.add_argument(
        "--steps", type=options.count, help=f"batches a run (default: {_STEPS}; each preset has its own number)"
    )
    parser.add_argument("--seeds", type=options.count, default=3, help="runs a set-up (default: %(default)s)")
    parser.add_argument("--out", default="study", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.preset is not None:
        return effects.run(options)
    from loops.study.report import write_report

    setups = strategy_setups(options.strategy) if options.strategy else choose_setups(options.setup)
    if options.task not in tasks.IMAGE_TASKS:
        raise scaler.InvalidArgument(
            f"study {options.task!r}: expected one of {', '.join(tasks.IMAGE_TASKS)}. A study measures the gradients "
            "of images; train other tasks one by one with halfstep train."
        )
    task = tasks.load(options.task)
    summary = run_study(
        task, setups, steps=options.steps or _STEPS, seeds=options.seeds, out=options.out, progress=Progress
    )
    written = write_report(pathlib.Path(options.out))
    if options.json:
        print(to_json(summary))
    else:
        console = rich.console.Console()
        console.print(table(summary))
        console.print(f"wrote {', '.join(str(path) for path in written)}", soft_wrap=True, highlight=False)
    for run in failed(summary.get("runs", ())):
        print(f"halfstep: {failure(run)}", file=sys.stderr)
    return exit_status(summary)


def exit_status(summary: Mapping) -> int:
    """What a script may rely on: 0 if all runs finished, 3 if some failed, 1 if no candidate finished.

    float32 beside strategies is what they are compared with, and no candidate.
    """
    runs = summary.get("runs", ())
    if not failed(runs):
        return 0
    finished = {run["setup"] for run in runs if "error" not in run}
    return EXIT_SOME_FAILED if finished - {SETUPS[0].name} else EXIT_ALL_FAILED


def table(summary: dict) -> rich.table.Table:
    """The rows of a study for a terminal."""
    result = rich.table.Table(
        box=rich.box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        caption="means over seeds; zero: share of non-zero gradients of weights (w) and activations (a) "
        "that float16 makes zero at the loss scale in use",
    )
    for heading in ("set-up", "accuracy", "vs f32", "loss", "skipped", "zero w", "zero a"):
        # A long name is folded before a number is cut.
        name = heading == "set-up"
        result.add_column(heading, justify="left" if name else "right", no_wrap=not name, overflow="fold")
    for row in summary["setups"]:
        result.add_row(row["name"], *_results(row), _share(row["flushed_weights"]), _share(row["flushed_activations"]))
    return result


def _results(row: Mapping) -> tuple[str, str, str, str]:
    if row["accuracy"] is None:
        return "failed", "–", "–", "–"
    note = f" ({row['failed']} failed)" if row["failed"] else ""
    difference = "–" if row["difference"] is None else f"{row['difference']:+.1f}"
    return f"{row['accuracy']:.1%}{note}", difference, f"{row['final_loss']:.1e}", f"{row['skipped']:.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else share(value)
