"""`halfstep study`: set-ups compared, with a report."""

from __future__ import annotations

import argparse
import pathlib

import rich.box
import rich.console
import rich.table

import scaler
from loops import tasks
from loops.actions import Progress
from loops.cli import arguments
from loops.runs import to_json
from loops.strategies import FORMS
from loops.study.compare import run_study
from loops.study.setups import SETUPS, choose_setups, strategy_setups


def add_parser(commands) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("study", help="compare precisions and scalings on a task, with a report")
    parser.add_argument("task", nargs="?", default="digits", metavar="TASK", help="digits or mnist (default: digits)")
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
    parser.add_argument("--steps", type=arguments.count, default=400, help="batches a run (default: %(default)s)")
    parser.add_argument("--seeds", type=arguments.count, default=3, help="runs a set-up (default: %(default)s)")
    parser.add_argument("--out", default="study", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from loops.study.report import write_report

    setups = strategy_setups(options.strategy) if options.strategy else choose_setups(options.setup)
    task = tasks.load(options.task)
    if not isinstance(task, tasks.ImageTask):
        raise scaler.InvalidArgument(f"study {options.task}: it measures images. Use digits or mnist.")
    summary = run_study(task, setups, steps=options.steps, seeds=options.seeds, out=options.out, progress=Progress)
    written = write_report(pathlib.Path(options.out))
    if options.json:
        print(to_json(summary))
        return
    console = rich.console.Console()
    console.print(table(summary))
    console.print(f"wrote {', '.join(str(path) for path in written)}", soft_wrap=True, highlight=False)


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
        result.add_column(heading, justify="left" if heading == "set-up" else "right", no_wrap=True)
    for row in summary["setups"]:
        result.add_row(
            row["name"],
            f"{row['accuracy']:.1%}",
            "–" if row["difference"] is None else f"{row['difference']:+.1f}",
            f"{row['final_loss']:.1e}",
            f"{row['skipped']:.1f}",
            _share(row["flushed_weights"]),
            _share(row["flushed_activations"]),
        )
    return result


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}" if value >= 1e-4 or value == 0 else f"{value:.0e}"
