"""How far ahead a forecast warns of runs that diverge, and how often of runs that do not.

    python benchmarks/forecast_runs.py --out FOLDER [--runs HELD_OUT] [--quick] [--json]

The runs of `forecast_problems.py` are recorded into a folder, a trace for each; those that are there already are only
read, so that another rule is tried in seconds. A warning of a run with a fault counts from the fault's first step on:
before that it is a false alarm. The lead is in steps before the divergence, as `divergence` defines it. The rule of
growth alone, which was the whole forecast of 0.2.0, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import forecast_problems
import numpy as np
import paired
from forecast_problems import PLANTED, STEPS, Run

import loops
import loops.record.forecast
import scaler
from loops.observe import Alarm, forecast

MEAN_OF = 8
"""The first and the best value of the loss are means of so many steps."""
TIMES, SHARE = 10, 0.75
"""A loss is bad above so many times its best value, and above this share of its first."""
RECOVERY = 16
"""A run that has so many good steps in a row has recovered."""
USED = ("step", "loss", "loss_scale", "grad_norm", "critical_low", "critical_high", "headroom", "applied")


class Outcome(NamedTuple):
    """What a rule said of a run.

    Attributes:
        run: Which.
        diverged: The step of its divergence; None if there was none.
        alarm: The alarm; None if there was none.
        early: Whether the alarm came before the fault began.
    """

    run: Run
    diverged: int | None
    alarm: Alarm | None
    early: bool

    @property
    def lead(self) -> int | None:
        """Steps from the alarm to the divergence; negative if the alarm came late, None without one."""
        if self.alarm is None or self.diverged is None or self.early:
            return None
        return self.diverged - self.alarm.step

    @property
    def false(self) -> bool:
        """Whether it warned of a healthy run, or of one that was still healthy."""
        return self.alarm is not None and (self.early or not self.run.planted)


def divergence(columns: dict[str, np.ndarray]) -> int | None:
    """The step from which on a run never recovered; None if it ended healthy.

    A step is bad if it was skipped, or its loss is not finite, or lies both above 10 times the best mean of 8 so far
    and above three quarters of the first: the run has lost what it had learned. It diverges at the first bad step after
    which no 16 good ones follow each other, up to the end of the run.
    """
    loss, applied = columns["loss"], columns["applied"].astype(bool)
    first = best = float(np.mean(loss[:MEAN_OF]))
    since, begins = 0, None
    for row, value in enumerate(loss):
        good = applied[row] and value <= max(TIMES * best, SHARE * first)
        since = since + 1 if good else 0
        if since >= RECOVERY:
            begins = None
            best = min(best, float(np.mean(loss[row - MEAN_OF + 1 : row + 1])))
        elif not good and begins is None:
            begins = int(columns["step"][row])
    return begins


def record(run: Run, path: pathlib.Path, steps: int = STEPS) -> None:
    """Trains a run and writes its trace."""
    # A file under its own name is whole.
    part = path.with_suffix(".part")
    loop = forecast_problems.loop_of(run, part)
    try:
        loop.run(steps)
    except scaler.ScalerError as error:
        # A scaler that makes no progress says so, long after the divergence.
        print(f"{run.name}: {type(error).__name__} at step {loop.counters.attempted}", file=sys.stderr)
    part.rename(path)


def columns_of(path: pathlib.Path) -> dict[str, np.ndarray]:
    """What a forecast may see of a recorded run, and whether its steps were applied."""
    steps = loops.observe.read(path).steps
    return {name: np.asarray(steps[name].to_numpy(zero_copy_only=False)) for name in USED}


def outcome(run: Run, columns: dict[str, np.ndarray], rule: Callable[[Any], Alarm | None] = forecast) -> Outcome:
    """What a rule says of a run."""
    alarm = rule(columns)
    early = alarm is not None and run.planted and alarm.step < run.drawn()[0]
    return Outcome(run, divergence(columns), alarm, early)


def growth_alone(columns: dict[str, np.ndarray]) -> Alarm | None:
    """The forecast of 0.2.0: no line through the headroom, and no new count where the loss jumps."""
    no_jump = unittest.mock.patch.object(loops.record.forecast, "JUMP", math.inf)
    with no_jump, unittest.mock.patch.object(loops.record.forecast, "AHEAD", -1):
        return forecast(columns)


def figures(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """What a rule is worth on runs."""
    outcomes = list(outcomes)
    planted = [one for one in outcomes if one.run.planted and one.diverged is not None]
    healthy = [one for one in outcomes if not one.run.planted and one.diverged is None]
    leads = [-np.inf if one.lead is None else one.lead for one in planted]
    # A run without a warning has no lead: it counts as the shortest.
    quartiles = [_or_none(value) for value in np.quantile(leads, [0.25, 0.5, 0.75], method="lower")] if leads else None
    return {
        "diverged": len(planted),
        "20 possible": sum(one.diverged - one.run.drawn()[0] >= 20 for one in planted),
        "ahead": sum(lead > 0 for lead in leads),
        "20 ahead": sum(lead >= 20 for lead in leads),
        "late": sum(-np.inf < lead <= 0 for lead in leads),
        "lead quartiles": quartiles,
        "healthy": len(healthy),
        "false": sum(one.false for one in healthy),
        "before the fault": sum(one.false for one in planted),
    }


def table(outcomes: list[Outcome]) -> list[dict]:
    """The figures of all runs, of each kind, and of each problem."""
    parts = {"all": outcomes}
    for place in ("kind", "problem"):
        for name in dict.fromkeys(getattr(one.run, place) for one in outcomes):
            parts[name] = [one for one in outcomes if getattr(one.run, place) == name]
    return [{"runs": name} | figures(part) for name, part in parts.items()]


def rows_of(outcomes: list[Outcome]) -> list[dict]:
    """A row for each run."""
    return [
        {
            "run": one.run.name,
            "begins": one.run.drawn()[0] if one.run.kind in (*PLANTED, "change", "curriculum", "larger") else None,
            "diverged": one.diverged,
            "alarm": None if one.alarm is None else one.alarm.step,
            "lead": one.lead,
            "false": one.false,
        }
        for one in outcomes
    ]


def _or_none(value: float) -> int | None:
    return int(value) if np.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder of the recorded runs")
    parser.add_argument("--runs", choices=("CHOSEN_ON", "HELD_OUT", "LARGER"), default="HELD_OUT")
    parser.add_argument("--quick", action="store_true", help="two runs, 40 steps: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs, steps = getattr(forecast_problems, options.runs), STEPS
    if options.quick:
        runs, steps = (runs[0], runs[-1]), 40
    began, columns = time.perf_counter(), {}
    for run in runs:
        path = options.out / f"{run.name}-{steps}.arrow"
        if not path.exists():
            print(f"{run.name} ...", file=sys.stderr, flush=True)
            record(run, path, steps)
        columns[run] = columns_of(path)
    outcomes = [outcome(run, seen) for run, seen in columns.items()]
    found = {
        "benchmark": "forecast_runs",
        "runs": options.runs,
        "machine": paired.machine(),
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "figures": table(outcomes),
        "growth alone": table([outcome(run, seen, growth_alone) for run, seen in columns.items()]),
        "cases": rows_of(outcomes),
    }
    print(json.dumps(found, indent=2) if options.json else as_markdown(found))


def as_markdown(found: dict) -> str:
    """The tables of a page."""
    lines = ["; ".join(f"{key} {value}" for key, value in found["machine"].items()), ""]
    lines += [f"## {found['benchmark']}: {found['runs']}, {found['steps']} steps a run", ""]
    for name in ("figures", "growth alone", "cases"):
        rows = found[name]
        lines += [f"### {name}", "", f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
        lines += [f"| {' | '.join(map(_cell, row.values()))} |" for row in rows] + [""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join("none" if one is None else str(one) for one in value)
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
