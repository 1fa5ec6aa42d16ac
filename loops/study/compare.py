"""Runs every set-up with every seed, estimates how long that takes, and summarises the results.

Runs that differ in their seed alone, with one trace of their step.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.actions import Progress
from loops.loop.loop import Loop
from loops.loop.state.variables import variable_groups
from loops.loop.visit import Action
from loops.record.files import STEPS, SUMMARY, write_json
from loops.run.train import RunOptions, build, model_of, train
from loops.step.train_step import TrainStep
from loops.study.measured import Costs, EnergyMeter, GradientAction, GradientProbe, costs_of, counts_as_dict, no_counts
from loops.study.setups import Setup, failed
from loops.support.run_locks import RunLocks
from loops.support.text import amount
from loops.support.written import Place
from loops.tasks import ImageTask, Task


def run_study(
    task: Task,
    setups: Sequence[Setup],
    *,
    steps: int,
    seeds: int,
    out: str | os.PathLike,
    progress: Callable[[str], Progress] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict:
    """Trains every set-up with seeds 0 to `seeds` - 1, one after the other.

    Writes `out/runs/SETUP-seedN/{steps.jsonl,summary.json}` as it goes and `out/summary.json` at the end.

    A run that fails, for example with `scaler.StuckError`, does not end the study: its results up to the failure are
    kept, the summary has its error, and the other runs go on.

    Args:
        task: An image task from `loops.tasks.load`.
        setups: The set-ups to compare.
        steps: The batches of each run.
        seeds: The number of seeds.
        out: The folder to write; it is created if missing.
        progress: Returns the `Progress` to show for a run, given its label.
        say: Called after the first run of a set-up with a sentence on how long all runs take.

    Returns:
        What `out/summary.json` holds: `task`, `steps`, `seeds`, `setups` (see `summarise`) and `runs`, each a run's
        summary with its `setup`, `folder`, `gradients` and `costs`. A failed run has its options, and instead of
        results an `error` with `type`, `message` and `step`, the last step that was visited.

    Raises:
        scaler.InvalidArgument: If the task is not an image task.
        OSError: If `out` cannot be written, or another study writes it: then no run could be saved.
    """
    if not isinstance(task, ImageTask):
        raise scaler.InvalidArgument(
            f"run_study({type(task).__name__} {task.name!r}): a study measures the gradients of images: expected a "
            "loops.tasks.ImageTask, such as digits. Train other tasks with loops.run.train."
        )
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    probes = {scaled: GradientProbe(task, unit_scaled=scaled) for scaled in {setup.unit_scaled for setup in setups}}
    known = dict[tuple, dict | None]()
    runs, estimate = [], Estimate(setups, seeds)
    meter = EnergyMeter()
    with RunLocks([("study", Place(out, "folder"))]):
        (out / SUMMARY).unlink(missing_ok=True)
        for place, setup in enumerate(setups):
            trace = SharedTrace()
            for seed in range(seeds):
                costs, start = Costs(meter), time.monotonic()
                run = _run(task, setup, steps, seed, out, probes[setup.unit_scaled], costs, trace, progress)
                own = costs.as_dict(task, RunOptions.batch_size, known)
                if setup.emulated is not None:
                    own["bytes"] = None  # They would be those of the emulation.
                runs.append({**run, "costs": own})
                if said := estimate.ran(place, time.monotonic() - start):
                    say(said)
        summary = {
            "task": task.name,
            "steps": steps,
            "seeds": seeds,
            "setups": summarise(setups, runs),
            "runs": runs,
        }
        write_json(out / SUMMARY, summary)
    return summary


def summarise(setups: Sequence[Setup], runs: Sequence[dict]) -> list[dict]:
    """One row for each set-up, over its seeds.

    Returns:
        Dicts with `name`, `title` and `failed` (the number of failed runs). Over the finished runs, None if there are
        none: `accuracy` (mean, in [0, 1]) with `accuracy_min` and `accuracy_max`, `difference` (mean accuracy minus
        that of "float32", in percentage points), `final_loss` (mean; NaN if any is) and `skipped` (mean number of
        steps), and the costs from `costs_of`. Over all runs: `flushed_weights` and `flushed_activations` (share of
        non-zero gradient values that float16 makes zero at the scale in use; None for float32).
    """
    rows: list[dict] = []
    for setup in setups:
        own = [run for run in runs if run["setup"] == setup.name]
        broken = failed(own)
        finished = [run for run in own if run not in broken]
        accuracies = [run["accuracy"] for run in finished]
        rows.append(
            {
                "name": setup.name,
                "title": setup.title,
                "failed": len(broken),
                "accuracy": _mean(accuracies),
                "accuracy_min": min(accuracies, default=None),
                "accuracy_max": max(accuracies, default=None),
                "final_loss": _mean([run["final_loss"] for run in finished]),
                "skipped": _mean([run["skipped"] for run in finished]),
                "flushed_weights": None if setup.policy == "float32" else _flushed(own, "weights"),
                "flushed_activations": None if setup.policy == "float32" else _flushed(own, "activations"),
                **costs_of(finished),
            }
        )
    reference = next((row["accuracy"] for row in rows if row["name"] == "float32"), None)
    for row in rows:
        known = reference is not None and row["accuracy"] is not None
        row["difference"] = 100 * (row["accuracy"] - reference) if known else None
    return rows


def _run(
    task: ImageTask,
    setup: Setup,
    steps: int,
    seed: int,
    out: pathlib.Path,
    probe: GradientProbe,
    costs: Costs,
    trace: SharedTrace,
    progress: Callable[[str], Progress] | None,
) -> dict:
    folder = f"runs/{setup.name}-seed{seed}"
    options = setup.options(steps, seed)
    counting: list[GradientAction] = []

    def actions(model: keras.Model) -> list[Action]:
        counting.append(probe.counting(model, setup.loss_factor))
        shown = [progress(f"{setup.name} seed {seed}")] if progress else []
        return [costs, *counting, *shown, costs.leave]

    # Otherwise a run that fails before it writes would leave the files of an older study.
    for name in (STEPS, SUMMARY):
        (out / folder / name).unlink(missing_ok=True)
    try:
        with warnings.catch_warnings():
            # Set-ups without a scale are there to show it.
            warnings.filterwarnings("ignore", ".* norm of exactly zero", scaler.ScaleWarning)
            summary = train(task, options, out / folder, actions, built_by=trace.build)
    except Exception as error:
        trace.forget()
        if _concerns_all(error):
            raise
        found = {"type": type(error).__name__, "message": _sentence(error), "step": costs.visited}
        summary = {"task": task.name, **options.facts(), "error": found}
    gradients = counts_as_dict(counting[0].counts if counting else no_counts())
    return {"setup": setup.name, "folder": folder, **summary, "gradients": gradients}


def _concerns_all(error: BaseException) -> bool:
    """Whether the error affects all runs: they share the folder and the disk."""
    return isinstance(error, OSError) or (error.__cause__ is not None and _concerns_all(error.__cause__))


def _sentence(error: Exception) -> str:
    """The message of an error in one line, without the frames that TensorFlow adds inside a graph."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "[[" not in line]
    framed = (bool(lines) and not isinstance(error, scaler.ScalerError)) or str(error).startswith("in user code")
    return (lines[-1] if framed else " ".join(lines)).removeprefix(f"{type(error).__name__}: ") if lines else ""


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _flushed(runs: Sequence[dict], kind: str) -> float | None:
    nonzero = sum(run["gradients"][kind]["nonzero"] for run in runs)
    return sum(run["gradients"][kind]["flushed"] for run in runs) / nonzero if nonzero else None


class Estimate:
    """The seconds of the runs of a study.

    A run takes as long as those of its set-up, or else as those of the set-ups with its dtype policy, or else as all
    but those in float32: on a CPU 16 bits may take twenty times as long.

    Args:
        setups: The set-ups, in the order of their runs.
        seeds: How many runs each has.
    """

    def __init__(self, setups: Sequence[Setup], seeds: int):
        self._setups, self._seeds = setups, seeds
        self._seconds: list[list[float]] = []

    def ran(self, setup: int, seconds: float) -> str | None:
        """Records a run.

        Args:
            setup: The position of its set-up.
            seconds: How long it took.

        Returns:
            A sentence after the first run of a set-up, unless all is done then: what all runs take, and what is left.
        """
        if setup == len(self._seconds):
            self._seconds.append([])
        self._seconds[setup].append(seconds)
        runs, done = len(self._setups) * self._seeds, sum(map(len, self._seconds))
        if len(self._seconds[setup]) > 1 or done == runs:
            return None
        each = [self._of_one(place) for place in range(len(self._setups))]
        known = [seconds for seconds in each if seconds is not None]
        so_far = f"study: {done} of {runs} runs done"
        if len(known) < len(each):
            return f"{so_far}, about {duration(known[0])} each in float32; in 16 bits they may take far longer"
        whole = self._seeds * sum(known)
        left = whole - sum(map(sum, self._seconds))
        return f"{so_far}, about {duration(whole)} for all, {duration(left)} left"

    def _of_one(self, setup: int) -> float | None:
        """The seconds of one run of a set-up; None if nothing tells."""
        if setup < len(self._seconds):
            return sum(self._seconds[setup]) / len(self._seconds[setup])
        done = list(zip(self._setups, self._seconds, strict=False))
        policy = self._setups[setup].policy
        alike = [own for one, own in done if one.policy == policy]
        others = alike or [own for one, own in done if one.policy != "float32"]
        runs = [seconds for own in others for seconds in own]
        return sum(runs) / len(runs) if runs else None


def duration(seconds: float) -> str:
    """A rough time in words: seconds up to one and a half minutes, then minutes."""
    return amount(max(1, round(seconds)), "second") if seconds < 90 else amount(round(seconds / 60), "minute")


class SharedTrace:
    """Builds loops as `build` does, one after the other, and traces their step once.

    A later loop has the variables of the first, with the values that its own seed gives them. So a run must be over
    before the next is built, and a step whose trace depends on the seed cannot be shared: of the tasks here none has
    one.
    """

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._task: Task | None = None
        self._key: tuple = ()
        self._first: list[tuple[tf.Variable, tf.Tensor]] = []

    def build(
        self, task: Task, options: RunOptions, actions: Callable[[keras.Model], Iterable[Action]], **settings: Any
    ) -> Loop:
        """The loop of a run before its first step. Arguments are those of `build`, the same but for the seed."""
        key = (dataclasses.replace(options, seed=0), settings)
        # Tasks hold arrays, which do not compare as one.
        if self._loop is None or self._task is not task or self._key != key:
            self._loop, self._task, self._key = build(task, options, actions, **settings), task, key
            groups = variable_groups(self._loop.train_step, self._loop.calls.trace())
            self._first = [(one, tf.identity(one)) for group in groups.values() for one in group]
            return self._loop
        step = self._loop.train_step
        assert isinstance(step, TrainStep)
        for variable, value in self._first:
            variable.assign(value)
        keras.utils.set_random_seed(options.seed)
        for variable, fresh in zip(step.model.variables, model_of(task, options).variables, strict=True):
            variable.assign(fresh)
        # The scaler looks back over its counters, which are zero again.
        step.loss_scaler.check()
        self._loop.restart(task.dataset(options.batch_size, options.seed), actions(step.model))
        return self._loop

    def forget(self) -> None:
        """Has the next loop built and traced again."""
        self._loop = None
