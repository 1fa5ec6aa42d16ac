"""Builds the loop of a recorded run again, with the run's own program or from the metadata of `halfstep train`.

Repeats steps of a run without calling any action.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import scaler
from loops import tasks
from loops.actions.checkpoint import Checkpoint
from loops.loop.loop import Loop
from loops.record.files import CHECKPOINTS, STEPS, SUMMARY, TRACE, check_run
from loops.record.lines import JsonLines
from loops.record.run_metadata import metadata_of
from loops.run.rewind.batches import Batches
from loops.run.train import RunOptions, build, run_identity
from loops.support.errors import LoopError, OutOfData
from loops.support.signals import Deferred
from loops.support.text import amount
from loops.support.user_function import called

_NEVER = 2**62


def open_run(run: str | os.PathLike, build_with: str | None = None) -> Loop:
    """The loop of a run as it was before its first step, with its `Checkpoint` among the actions. Nothing is written.

    Args:
        run: The folder given to `halfstep train --out`, or to a program's actions.
        build_with: `module:function`, importable from the current folder. The function is called with the folder as a
            `pathlib.Path`, or without arguments if it takes none, and returns the `Loop`. By default the run is one of
            `halfstep train`: operations are made deterministic for the whole process, and its seeds are set.

    Raises:
        scaler.InvalidArgument: If there is no such folder, module or function, or it does not return a `Loop`.
        LoopError: If the folder is not that of a run of `halfstep train`, or its data is not available.
    """
    run = check_run(run)
    return _of_train(run) if build_with is None else _of_program(run, build_with)


def _of_program(run: pathlib.Path, text: str) -> Loop:
    loop = called(text, run)
    if not isinstance(loop, Loop):
        raise scaler.InvalidArgument(f"--build {text}: it returned {loop!r}: expected an hs.Loop.")
    if not any(isinstance(action, Checkpoint) for action in loop.actions):
        raise scaler.InvalidArgument(
            f"--build {text}: the loop that it returned has no hs.Checkpoint among its actions: expected that of "
            f"the run, such as hs.Checkpoint(run / {CHECKPOINTS!r}, every=500)."
        )
    return loop


def _of_train(run: pathlib.Path) -> Loop:
    metadata = metadata_of(run).facts
    if not metadata:
        raise LoopError(
            f"{run}: neither a readable checkpoint in {CHECKPOINTS} nor a {SUMMARY}, so the run is unknown. "
            "Name the program that made it: --build module:function."
        )
    if metadata.get("replicas", 1) > 1 or metadata.get("workers", 1) > 1:
        raise LoopError(
            f"{run}: its {metadata['replicas']} replicas cannot be rewound without the program: name it with --build "
            "module:function. It must return the loop on as many devices of one process, with a "
            "tf.distribute.MirroredStrategy; run a program of several workers again in this way."
        )
    if "task" not in metadata:
        raise LoopError(
            f"{run}: a program made this run, not halfstep train. Name the function of the program that returns its "
            "hs.Loop, as in --build my_run:build."
        )
    fields = {field.name for field in dataclasses.fields(RunOptions)} - {"steps"}
    missing = sorted(fields - set(metadata))
    if missing:
        raise LoopError(
            f"{run}: its files lack its {', '.join(missing)}, which those of halfstep train have. Name the program "
            "that made the run: --build module:function."
        )
    task = tasks.load(metadata["task"])
    options = RunOptions(steps=_NEVER, **{name: metadata[name] for name in fields})
    return build(
        task,
        options,
        lambda model: [
            JsonLines(run / STEPS),
            Checkpoint(run / CHECKPOINTS, every=_NEVER, run=run_identity(task, options)),
        ],
        # Probes may change the bits of a step: use them if the run did.
        probes=(run / TRACE).is_file(),
    )


Replayed = dict[int, dict[str, np.ndarray]]
"""The scalar outputs of each step, by its number."""


def run_to_step(
    loop: Loop,
    batches: Batches,
    until: int,
    rows: Sequence[Mapping],
    signals: Deferred,
    progress: Callable[[int], object] | None = None,
) -> Replayed:
    """Takes steps as the run did, in calls of the same length.

    Args:
        loop: The loop, at an earlier step.
        batches: The loop's batches.
        until: The step to stop after.
        rows: Of the run's log: where a window ended early it ends so again, also that of the step after `until`.
        signals: The signals received, which are acted on after each call.
        progress: Called with the number of the last step, after each call.

    Raises:
        OutOfData: If the dataset ends before.
    """
    replayed: Replayed = {}
    ends = sorted(row["step"] for row in rows if row.get("attempted"))
    while (done := loop.counters.data) < until:
        if loop.applies_last_windows:
            following = next((step for step in ends if step > done), until + 1)
            loop.end_windows(following == done + 1)
            limit = max(1, min(following - 1, until) - done)
        else:
            limit = until - done
        taken, outputs = _call(loop, batches, limit)
        for place in range(taken):
            replayed[done + 1 + place] = {name: values[place] for name, values in outputs.items()}
        if not taken:
            steps = amount(done, "step")
            raise OutOfData(f"the dataset ended after {steps}, but the run went on at least to step {until}.")
        signals.act()
        if progress:
            progress(done + taken)
    loop.end_windows(until + 1 in ends)
    return replayed


def _call(loop: Loop, batches: Batches, left: int) -> tuple[int, dict[str, np.ndarray]]:
    if not batches.by_one:
        return loop.take(min(loop.longest_call, left))
    batch = batches.next()
    if batch is None:
        return 0, {}
    return 1, {name: value[np.newaxis] for name, value in loop.calls.one(batch).items()}
