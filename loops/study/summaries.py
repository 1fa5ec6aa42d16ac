"""Reads a study's `summary.json` and the steps of its runs, for figures and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Steps = Mapping[str, Sequence[Mapping]]
"""The lines of each run's `steps.jsonl`, by the run's `folder`; fewer than the study's steps if a run failed."""


def runs_of(summary: Mapping, row: Mapping) -> list[Mapping]:
    """The runs of a row of `summary["setups"]`."""
    return [run for run in summary["runs"] if run["setup"] == row["name"]]


def options_of(summary: Mapping, row: Mapping) -> Mapping:
    """The options that the runs of a row share, such as `policy` and `strategy`, from its first run."""
    return runs_of(summary, row)[0]


def failed(runs: Sequence[Mapping]) -> list[Mapping]:
    """The runs that ended with an error."""
    return [run for run in runs if "error" in run]


def failure(run: Mapping) -> str:
    """Which run failed, where and why, in one line."""
    error = run["error"]
    return f"{run['setup']} seed {run['seed']} failed {place(run)}: {error['type']}: {error['message']}"


def place(run: Mapping) -> str:
    """Where a run failed: "at step 150"."""
    step = run["error"]["step"]
    return f"at step {step}" if step else "before its first step"


def split_rows(summary: Mapping) -> tuple[list[Mapping], list[Mapping]]:
    """The rows of `summary["setups"]` that train on the plain loss, and those on a loss times a constant."""
    plain = [row for row in summary["setups"] if options_of(summary, row)["loss_factor"] == 1]
    return plain, [row for row in summary["setups"] if row not in plain]


def comparable(summary: Mapping, row: Mapping, other: Mapping) -> bool:
    """Whether two rows train on the same loss."""
    return options_of(summary, row)["loss_factor"] == options_of(summary, other)["loss_factor"]


def losses(summary: Mapping, steps: Steps, row: Mapping) -> np.ndarray:
    """The losses of a set-up without its constant factor, float [runs, steps]; NaN for missing or non-finite ones.

    The runs are those that finished, or all if none did.
    """
    runs = [run for run in runs_of(summary, row) if "error" not in run] or runs_of(summary, row)
    table = np.full((len(runs), summary["steps"]), np.nan)
    for values, run in zip(table, runs, strict=True):
        for record in steps[run["folder"]]:
            if record["loss"] is not None:
                values[record["step"] - 1] = record["loss"] / run["loss_factor"]
    return table


def skipped(record: Mapping) -> bool:
    """Whether a line of `steps.jsonl` is of a skipped step."""
    return record["attempted"] and not record["applied"]


def scale_moves(summary: Mapping, steps: Steps, row: Mapping) -> bool:
    """Whether a run of the row had more than one loss scale, or skipped a step."""
    runs = [steps[run["folder"]] for run in runs_of(summary, row)]
    return any(len({record["loss_scale"] for record in run}) > 1 or any(map(skipped, run)) for run in runs)


def constant_scale(summary: Mapping, steps: Steps, row: Mapping) -> float | None:
    """The loss scale of a row whose scale never moves; None for others, and before the first step."""
    known = {record["loss_scale"] for run in runs_of(summary, row) for record in steps[run["folder"]]}
    return known.pop() if len(known) == 1 and not scale_moves(summary, steps, row) else None
