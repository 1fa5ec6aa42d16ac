"""Runs every set-up with every seed, and says how they compare."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from loops.actions import Progress
from loops.runs import RunOptions, train, write_json
from loops.study.gradients import GradientAction, GradientProbe
from loops.study.setups import Setup
from loops.tasks import ImageTask


def run_study(
    task: ImageTask,
    setups: Sequence[Setup],
    *,
    steps: int,
    seeds: int,
    out,
    progress: Callable[[str], Progress] | None = None,
) -> dict:
    """Trains every set-up with seeds 0 to `seeds` - 1, one after the other.

    Writes `out/runs/SETUP-seedN/{steps.jsonl,summary.json}` as it goes and `out/summary.json` at the end.

    Args:
        task: From `loops.tasks.load`.
        setups: What to compare.
        steps: Batches of each run.
        seeds: How many seeds.
        out: A folder; it is made if missing.
        progress: Given a label, the `Progress` to show for a run.

    Returns:
        What `out/summary.json` holds: `task`, `steps`, `seeds`, `setups` (see `summarise`) and `runs`, each a run's
        summary with its `setup`, `folder` and `gradients`.
    """
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    probe = GradientProbe(task)
    runs = []
    for setup in setups:
        for seed in range(seeds):
            runs.append(_run(task, setup, steps, seed, out, probe, progress))
    summary = {
        "task": task.name,
        "steps": steps,
        "seeds": seeds,
        "setups": summarise(setups, runs),
        "runs": runs,
    }
    write_json(out / "summary.json", summary)
    return summary


def summarise(setups: Sequence[Setup], runs: Sequence[dict]) -> list[dict]:
    """One row for each set-up, over its seeds.

    Returns:
        Dicts with `name`, `title`, `accuracy` (mean, in [0, 1]) with `accuracy_min` and `accuracy_max`, `difference`
        (mean accuracy less that of "float32", in percentage points, or None), `final_loss` (mean; NaN if any is),
        `skipped` (mean steps), `flushed_weights` and `flushed_activations` (share of non-zero gradient values that
        float16 makes zero at the scale in use, or None for float32).
    """
    rows = []
    for setup in setups:
        own = [run for run in runs if run["setup"] == setup.name]
        accuracies = [run["accuracy"] for run in own]
        rows.append(
            {
                "name": setup.name,
                "title": setup.title,
                "accuracy": float(np.mean(accuracies)),
                "accuracy_min": min(accuracies),
                "accuracy_max": max(accuracies),
                "final_loss": float(np.mean([run["final_loss"] for run in own])),
                "skipped": float(np.mean([run["skipped"] for run in own])),
                "flushed_weights": None if setup.policy == "float32" else _flushed(own, "weights"),
                "flushed_activations": None if setup.policy == "float32" else _flushed(own, "activations"),
            }
        )
    reference = next((row["accuracy"] for row in rows if row["name"] == "float32"), None)
    for row in rows:
        row["difference"] = None if reference is None else 100 * (row["accuracy"] - reference)
    return rows


def _run(task: ImageTask, setup: Setup, steps: int, seed: int, out: pathlib.Path, probe: GradientProbe, progress):
    folder = f"runs/{setup.name}-seed{seed}"
    options = RunOptions(
        policy=setup.policy,
        strategy=setup.strategy,
        steps=steps,
        seed=seed,
        masters=setup.masters,
        loss_factor=setup.loss_factor,
    )
    counting: list[GradientAction] = []

    def actions(model):
        counting.append(probe.counting(model, setup.loss_factor))
        return [*counting, *([progress(f"{setup.name} seed {seed}")] if progress else [])]

    summary = train(task, options, out / folder, actions)
    gradients = {kind: counts.as_dict() for kind, counts in counting[0].counts.items()}
    return {"setup": setup.name, "folder": folder, **summary, "gradients": gradients}


def _flushed(runs: Sequence[dict], kind: str) -> float | None:
    nonzero = sum(run["gradients"][kind]["nonzero"] for run in runs)
    return sum(run["gradients"][kind]["flushed"] for run in runs) / nonzero if nonzero else None
