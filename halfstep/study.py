"""`halfstep study`: set-ups compared, with a report."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping

import scaler
from halfstep import effects
from halfstep.arguments.study import STEPS
from halfstep.statuses import EXIT_ERROR, EXIT_SOME_FAILED
from halfstep.terminal import folded, progress, width
from loops import tasks
from loops.record.files import to_json
from loops.study.compare import run_study
from loops.study.costs import COSTS, cost_cells, has_costs
from loops.study.setups import SETUPS, choose_setups, strategy_setups
from loops.study.summaries import failed, failure
from loops.support.columns import columns
from loops.support.plurals import share

_CAPTION = (
    "means over seeds; zero: share of non-zero gradients of weights (w) and activations (a) that float16 makes zero at "
    "the loss scale in use"
)

_COSTS = (
    "medians, with the quartiles of the time; the set-ups ran one after the other. MB: what a step holds. J: of the "
    "whole machine, where it tells"
)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
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
        task, setups, steps=options.steps or STEPS, seeds=options.seeds, out=options.out, progress=progress
    )
    written = write_report(pathlib.Path(options.out))
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
    """What a script may rely on: 0 if all runs finished, 3 if some failed, 1 if no candidate finished.

    float32 beside strategies is what they are compared with, and no candidate.
    """
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
    return "–" if value is None else share(value)
