"""How often the intervals of a replay hold what a real run does, on problems with which they were not made.

    python benchmarks/replay_coverage.py [--problems HELD_OUT] [--steps 200] [--quick] [--json]

Each problem is recorded with six seeds. For three of them each strategy is trained for real, from the same start, and
its skips, mean log2 scale and final scale are looked for in the intervals of the replay: those from the spread of the
six recorded runs, those from the real runs of the other four strategies, as `--validate` gives them, and the wider of
both. A static scale from `find_scale(runs=)` is trained with, too. `--problems` takes another set of
`replay_problems.py`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import paired
import replay_problems
import rich.console
import rich.table

import loops
import scaler
from loops.diagnose.find_scale import STATIC_MARGIN
from loops.record.trace import read
from loops.replay.intervals import LEVEL, Tail
from loops.replay.recording import Recording, recording_of
from loops.replay.replay import replay_recordings, static_scale
from loops.replay.results import Replayed
from loops.replay.train_again import History, change_strategy, difference, train_again
from loops.run.strategy_text import parse_strategy

RECORDED, TRAINED = 6, 3
"""The seeds that are recorded, and those of them for which each strategy is trained."""
STRATEGIES = (
    "dynamic:initial_scale=2**20,growth_interval=20",
    "dynamic:initial_scale=2**16,growth_interval=8,backoff_factor=0.25,hysteresis=2",
    "smooth:initial_scale=2**18,growth_interval=12",
    "log_normal:deviations=2,mean_decay=0.9,max_scale=2**30",
    "delayed_amax:margin=0,history_length=16",
)
FIGURES = ("skips", "mean_log2_scale", "final_scale")
SOURCES = ("seeds", "validated", "wider")


class Case(NamedTuple):
    """One strategy on one recorded run, and the real run."""

    problem: str
    strategy: str
    seed: int
    trained: History
    final: float

    def figures(self) -> dict[str, float]:
        """Those of the real run."""
        octaves = np.log2(self.trained.scales.astype(np.float64))
        return dict(zip(FIGURES, (int(self.trained.skipped.sum()), float(octaves.mean()), self.final), strict=True))


def recorded(problem, seed: int, steps: int, folder: pathlib.Path) -> Recording:
    """A run at the static scale 1024, and what its trace says."""
    path = folder / f"{problem.__name__}{seed}.arrow"
    loop = replay_problems.loop_of(problem, seed, scaler.Static(1024.0), [loops.Trace(path)])
    loop.run(steps)
    return recording_of(read(path), path.name)


def trained(problem, seed: int, steps: int, text: str) -> Case:
    """A real run with a strategy."""
    loop = replay_problems.loop_of(problem, seed, scaler.Static(1024.0), [])
    change_strategy(loop, parse_strategy(text))
    history = train_again(loop, steps)
    return Case(problem.__name__, text, seed, history, float(loop.train_step.loss_scaler.loss_scale))


def rows_of(problem, steps: int, strategies: tuple[str, ...], folder: pathlib.Path) -> tuple[list[dict], list[dict]]:
    """A row for each case of a problem, and one for each seed with the static scale that is recommended."""
    recordings = [recorded(problem, seed, steps, folder) for seed in range(RECORDED)]
    named = [(text, parse_strategy(text)) for text in strategies]
    cases = [trained(problem, seed, steps, text) for text in strategies for seed in range(TRAINED)]
    by_seeds = {one.strategy: one.runs for one in replay_recordings(recordings, named).strategies}
    known = {
        (case.strategy, case.seed): difference(
            by_seeds[case.strategy][case.seed],
            parse_strategy(case.strategy),
            case.trained,
            case.final,
            recordings[case.seed].step,
        )
        for case in cases
    }
    rows = []
    for case in cases:
        others = [one for (text, _), one in known.items() if text != case.strategy and one is not None]
        rows.append(_row(case, recordings, by_seeds[case.strategy][case.seed], others))
    return rows, _static(problem, recordings, steps)


def _row(case: Case, recordings: list[Recording], replayed: Replayed, others: list[Tail]) -> dict:
    named = [(case.strategy, parse_strategy(case.strategy))]
    alone = replay_recordings([recordings[case.seed]], named, differences=others).strategies[0]
    both = replay_recordings(recordings, named, differences=others).strategies[0].runs[case.seed]
    real = case.figures()
    row = {
        "problem": case.problem,
        "strategy": case.strategy,
        "seed": case.seed,
        "may_differ_at": replayed.may_differ_at,
    }
    row["same_scale"] = float((case.trained.scales == replayed.scales).mean())
    row["replayed"] = {name: getattr(replayed, name) for name in FIGURES}
    row["trained"] = real
    for source, one in zip(SOURCES, (replayed, alone, both), strict=True):
        found = None
        if one.intervals is not None:
            found = {name: list(getattr(one.intervals, name)) for name in FIGURES}
        elif one.may_differ_at is None:
            # Without a skip that differs the replay claims the very figures.
            found = {name: [value, value] for name, value in row["replayed"].items()}
        row[source] = found
        row[f"{source}_holds"] = found and {name: found[name][0] <= real[name] <= found[name][1] for name in FIGURES}
    return row


def _static(problem, recordings: list[Recording], steps: int) -> list[dict]:
    found = static_scale(recordings)
    if found is None:
        return [{"problem": problem.__name__, "seed": None, "static": None, "skip_rate": None}]
    scale = found * 2.0**-STATIC_MARGIN
    runs = [trained(problem, seed, steps, f"static:{scale!r}") for seed in range(TRAINED)]
    return [
        {"problem": case.problem, "seed": case.seed, "static": scale, "skip_rate": float(case.trained.skipped.mean())}
        for case in runs
    ]


def summary(rows: list[dict]) -> list[dict]:
    """For each source of intervals and each figure: the share of cases whose real run lies inside, and the width."""
    lines = []
    for source in SOURCES:
        for figure in FIGURES:
            parted = [row for row in rows if row["may_differ_at"] is not None]
            with_one = [row for row in parted if row[source] is not None]
            widths = [_width(figure, row[source][figure]) for row in with_one]
            lines.append(
                {
                    "intervals from": source,
                    "figure": figure,
                    "cases that part": len(parted),
                    "with an interval": len(with_one),
                    "hold": _share([row[f"{source}_holds"][figure] for row in with_one]),
                    "median width": float(np.median(widths)) if widths else None,
                    "point holds": _share([row["trained"][figure] == row["replayed"][figure] for row in with_one]),
                    "all cases hold": _share([row[f"{source}_holds"][figure] for row in rows if row[source]]),
                }
            )
    return lines


def _width(figure: str, ends: list[float]) -> float:
    """In skips, or in octaves."""
    return float(np.log2(ends[1] / ends[0])) if figure == "final_scale" else ends[1] - ends[0]


def _share(flags: list[bool]) -> float | None:
    return float(np.mean(flags)) if flags else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", choices=("TUNED_ON", "HELD_OUT", "CHECKED"), default="HELD_OUT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="one problem, two strategies, 20 steps: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    problems = getattr(replay_problems, options.problems)
    steps, strategies = (20, STRATEGIES[:2]) if options.quick else (options.steps, STRATEGIES)
    began, rows, static = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for problem in problems[:1] if options.quick else problems:
            print(f"{problem.__name__} ...", file=sys.stderr, flush=True)
            more, scales = rows_of(problem, steps, strategies, pathlib.Path(folder))
            rows, static = rows + more, static + scales
    found = {
        "benchmark": "replay_coverage",
        "problems": options.problems,
        "machine": paired.machine(),
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "level": LEVEL,
        "coverage": summary(rows),
        "static": static,
        "cases": rows,
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for lines in (found["coverage"], found["static"]):
        table = rich.table.Table(*lines[0])
        for line in lines:
            table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in line.values()))
        rich.console.Console(width=160).print(table)


if __name__ == "__main__":
    main()
