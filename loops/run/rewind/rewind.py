"""Goes back to just before a step of a run: from the newest checkpoint before it, or from the beginning.

The run is that of a loop, or one that is built again, with its own program or from the metadata of `halfstep train`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops import tasks
from loops.actions.checkpoint import Checkpoint
from loops.actions.rewind import Rewind
from loops.loop.kept_batches import KeptBatches
from loops.loop.loop import Loop
from loops.loop.state import folder
from loops.loop.state.compared import check_identity
from loops.loop.state.resources import unsaved_random_operations
from loops.loop.state.state import RunState
from loops.record.files import CHECKPOINTS, STEPS, SUMMARY, TRACE, check_run, metadata_of
from loops.record.lines import JsonLines
from loops.record.log import read_log
from loops.run.rewind.batches import Batches, caveats_of_data, run_to_step, stored_by
from loops.run.rewind.replay_point import START, ReplayPoint, Snapshot, batches_before
from loops.run.train import RunOptions, build, run_identity
from loops.support.errors import LoopError, ResumeWarning, check_count
from loops.support.signals import deferred_signals
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
    _check_same_run(loop, run, text)
    return loop


def _check_same_run(loop: Loop, run: pathlib.Path, text: str) -> None:
    """Otherwise what is told would be of another run than the one that was named."""
    for action in loop.actions:
        if isinstance(action, Checkpoint):
            name, used = CHECKPOINTS, action.directory
        elif isinstance(action, JsonLines):
            name, used = STEPS, action.path
        else:
            continue
        if (run / name).exists() and run.resolve() not in pathlib.Path(used).resolve().parents:
            raise scaler.InvalidArgument(
                f"--build {text}: the loop that it returned has {used} among its files, but {run} has {name} of its "
                "own: expected the loop of that run. Let the function take the folder as its argument, and write below "
                "it; or name the folder that it writes to."
            )


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


_FEW = 100
"""So many steps are quickly repeated from the beginning."""
_MIDDLE = "before"
"""The mark ahead of these batches."""


def rewind(
    loop: Loop,
    step: int,
    *,
    run: pathlib.Path | None = None,
    at_least: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> ReplayPoint:
    """Repeats a run's steps from the newest complete checkpoint before `step`, and stops just before `step`.

    Nothing is written into the run's folder, and no action of the loop begins, acts or ends. If a program's actions
    change the training, for example by setting the learning rate at a visit, the replayed steps therefore differ from
    those of the run: `ReplayPoint.differs` says from which step on.

    If there is no checkpoint before `step`, the steps are repeated from the beginning: the loop must be new, with the
    seeds of the run.

    Args:
        loop: A loop in one process with the run's `Checkpoint` among its actions and as many replicas as the run. It
            cannot be used for anything else afterwards.
        step: The step, counted in batches from 1, as in the log.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        at_least: The number of steps to repeat, for `ReplayPoint.from_checkpoint`: begins at an older checkpoint or,
            among the first hundred steps, at the beginning. If there is neither, or these steps differ from the run's,
            it begins at the newest checkpoint.
        progress: Called with the number of replayed steps and their total, after each call.

    Raises:
        scaler.InvalidArgument: For a step that the run did not take, or a loop without a `Checkpoint`.
        CheckpointError: If the checkpoints are of another run, or of other variables.
        OutOfData: If the dataset ends before the step.
        LoopError: If the loop is on several workers, or must start from the beginning and cannot.
        KeyboardInterrupt: After SIGINT, at the end of the current call.
        SystemExit: After SIGTERM, with status 143, at the end of the current call.
    """
    saves = _checked(loop, step)
    rows = read_log(log_of(loop, run))
    _check_taken(step, rows, saves)
    with deferred_signals() as signals:
        stored = stored_by(loop)
        began_at, state, caveats, of_data = _begin(loop, saves, step, at_least, stored)
        batches = Batches(loop.position, began_at, stored if of_data else None)
        batches.mark(START)
        variables = [*(one for group in state.groups.values() for one in group), *state.trackables()["counters"]]
        kernels = bool(unsaved_random_operations(loop.calls.trace()))

        def snapshot() -> Snapshot:
            return Snapshot(variables, state.held, kernels=kernels)

        start = snapshot()
        signals.act()

        def report(done: int) -> None:
            if progress:
                progress(done - began_at, step - 1 - began_at)

        middle = max(began_at, step - 1 - batches_before(loop))
        replayed = run_to_step(loop, batches, middle, rows, signals, report)
        if middle > began_at:
            batches.mark(_MIDDLE)
        replayed |= run_to_step(loop, batches, step - 1, rows, signals, report)
        before = []
        if middle < step - 1 and not batches.lost:
            batches.go_back(_MIDDLE if middle > began_at else START)
            before = [batches.next() for _ in range(middle, step - 1)]
        moment = ReplayPoint(
            loop,
            snapshot,
            step=step,
            start=start,
            began_at=began_at,
            batches=batches,
            before=before,
            rows=rows,
        )
        if moment.batch is None:
            raise LoopError(f"step {step}: the dataset ended after {amount(step - 1, 'step')}.")
        of_data = caveats_of_data(loop, of_data, {one for one in batches.from_dataset if one <= step})
        moment.compare(replayed, lambda said: _why(said, [*of_data, *caveats]))
        signals.act()
    changed = not moment.reproduced and not of_data
    if at_least and changed and began_at < (folder.newest_whole(saves.place, max(step - _window(loop), 0))[0] or 0):
        # Something other than the steps changed the run. A later checkpoint may include it.
        return rewind(loop, step, run=run, progress=progress)
    return moment


def _window(loop: Loop) -> int:
    """Micro-batches per step: the batch that spoiled a window may be this far back, and is also repeated."""
    return getattr(loop.train_step, "accumulate", 1)


def _checked(loop: Loop, step: int) -> Checkpoint:
    """The loop's checkpoints, if it can be rewound at all."""
    if not isinstance(loop, Loop):
        raise scaler.InvalidArgument(f"rewind(loop={loop!r}): expected an hs.Loop.")
    check_count(f"step {step!r}", step)
    found = next((action for action in loop.actions if isinstance(action, Checkpoint)), None)
    if found is None:
        raise scaler.InvalidArgument(
            "the loop has no hs.Checkpoint among its actions: expected the one that saved the run, such as "
            "hs.Checkpoint('run/ckpt', every=500)."
        )
    if loop.workers.count > 1:
        raise LoopError(
            f"the loop has replicas on {loop.workers.count} workers, but a past step can only be repeated in one "
            "process. `loss_scaler.last_skip` names the variable and the replica. Run the program again in one "
            "process, with a MirroredStrategy of as many devices, and explain that run."
        )
    return found


def log_of(loop: Loop, run: pathlib.Path | None) -> pathlib.Path | None:
    """The log of a run: that of the loop's `JsonLines`, or else `steps.jsonl` in the run's folder."""
    writers = [action.path for action in loop.actions if isinstance(action, JsonLines)]
    return next(iter(writers), run / "steps.jsonl" if run else None)


def _check_taken(step: int, rows: list[dict], saves: Checkpoint) -> None:
    last = max([row["step"] for row in rows[-1:]] + folder.numbers(saves.place)[:1], default=None)
    if last is not None and step > last:
        raise scaler.InvalidArgument(
            f"step {step}: the run's log and checkpoints end at step {last}: expected a step from 1 to {last}."
        )


def _begin(
    loop: Loop, saves: Checkpoint, step: int, at_least: int, stored: KeptBatches | None
) -> tuple[int, RunState, list[str], list[str]]:
    """Restores the loop to where the replay begins.

    Returns:
        The step that the replay begins after, the state, the caveats except those of the data, and those of the data.
    """
    number, facts, damaged = _checkpoint(saves, max(step - _window(loop), 0), step, at_least, stored)
    for broken, why in damaged.items():
        warnings.warn(
            f"{saves.place}: the checkpoint of step {broken} is damaged ({why}); the steps are repeated from step "
            f"{number or 0} on.",
            ResumeWarning,
            stacklevel=3,
        )
    identity = saves.identity(loop)
    path = folder.prefix(saves.place, number or 0)
    if number is not None:
        check_identity(path, facts["identity"], identity)
    else:
        _check_new(loop, saves, step, identity)
    # A position that cannot be saved is restored by skipping, in the first iterator: a probe would make it.
    loop.position.problem = facts["data"]["problem"] if facts else None
    if not loop.position.problem:
        loop.position.probe()
    _check_left_out(loop, saves, facts, number or 0, step)
    state = loop.state(identity, actions=())
    if number is None:
        return 0, state, _but_of_data(loop), [*loop.position.caveats, *loop.position.caveats_of_a_new_start]
    state.check(path, facts)
    state.restore(tf.train.Checkpoint(**state.trackables()), path, facts)
    caveats = [*_but_of_data(loop), *_other_versions(facts["versions"])]
    return number, state, caveats, loop.position.caveats


def _checkpoint(
    saves: Checkpoint, limit: int, step: int, at_least: int, stored: KeptBatches | None
) -> tuple[int | None, dict[str, Any], dict[int, str]]:
    """The checkpoint to begin at, None for the beginning of the run; its JSON; and the damaged ones."""
    found = folder.newest_whole(saves.place, max(limit - at_least, 0))
    if found[0] is None and step > _FEW:
        return folder.newest_whole(saves.place, limit)
    if stored is None or stored.has(found[0] or 0, step):
        return found
    # Some of the batches are not stored. From a later checkpoint they may not be needed.
    later = folder.newest_whole(saves.place, limit)
    number, facts, _ = later
    return later if number is not None and facts["data"]["caveats"] and stored.has(number, step) else found


def _check_left_out(loop: Loop, saves: Checkpoint, facts: Mapping, number: int, step: int) -> None:
    for action in loop.actions:
        found = action.left_out_between(facts, saves.place, step - number) if isinstance(action, Rewind) else None
        if found is not None:
            raise LoopError(
                f"step {step}: batches {found.first} to {found.last} of the dataset were left out between it and the "
                f"checkpoint of step {number}, which a replay does not do. Take a step between two checkpoints after "
                "them."
            )


def _but_of_data(loop: Loop) -> list[str]:
    of_data = loop.position.caveats
    return [caveat for caveat in loop.caveats() if caveat not in of_data]


def _check_new(loop: Loop, saves: Checkpoint, step: int, identity: Mapping) -> None:
    if loop.counters.data:
        raise LoopError(
            f"{saves.place} has no whole checkpoint before step {step}, and this loop has already taken "
            f"{loop.counters.data} steps, so it cannot start from the beginning. Pass a new loop."
        )
    later, facts = folder.newest_facts(saves.place)
    if later is not None:
        check_identity(folder.prefix(saves.place, later), facts["identity"], identity)


def _other_versions(saved: Mapping[str, str]) -> list[str]:
    here = {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__}
    changed = [f"{name} {saved[name]}, here {here[name]}" for name in here if saved.get(name) not in (None, here[name])]
    return [f"the run was made with {'; '.join(changed)}, which may compute other bits"] if changed else []


def _why(differs: str, caveats: list[str]) -> str:
    usual = ["the same bits need the same program, machine, versions and number of threads"]
    reasons = dict.fromkeys(one.rstrip(".") for one in caveats or usual)
    return ". ".join([differs[0].upper() + differs[1:], *(one[0].upper() + one[1:] for one in reasons)]) + "."
