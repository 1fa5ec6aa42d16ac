"""Evaluates each checkpoint of a run, beside the process that trains."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.variables import components
from loops.loop.loop import Loop
from loops.loop.state import folder as checkpoints
from loops.loop.state.variables import check_layout, layout, warn_of_places
from loops.record.files import CHECKPOINTS, EVALUATIONS, check_run, checkpoints_of, is_complete
from loops.record.lines import MARK, STEP, metrics_of
from loops.record.log import read_log
from loops.support.errors import CheckpointError
from loops.support.json_values import without_nan
from loops.support.run_locks import RunLocks
from loops.support.written import AppendFile, Place, reason, writing


def evaluate_checkpoints(
    folder: str | os.PathLike,
    evaluate: Callable[[int], Mapping[str, float]],
    restore: keras.Model | Loop,
    *,
    follow: bool = True,
) -> dict[int, dict[str, float]]:
    """Evaluates each checkpoint of a run once, in the order of steps: beside the training process, or after it.

        validation = loops.Evaluate(model, held_out, [accuracy], every=1)
        loops.evaluate_checkpoints("run", validation.measure, model)

    It restores the variables of a checkpoint, calls `evaluate`, and appends a row to `evaluations.jsonl` in the run's
    folder, which `halfstep report` shows. It changes nothing of the run, and takes no lock of it. After a kill, call it
    again: it passes over each checkpoint that has a row. It evaluates a step again that the run took again with other
    values, as after a `Rewind`; then the last row counts. A checkpoint that the run removes first, or that is damaged,
    is skipped with a warning. `restore` keeps the values of the last checkpoint.

    Args:
        folder: The run's folder, with the folder `checkpoints` in it, or a folder of checkpoints.
        evaluate: A function of the step. It returns a dict of numbers by name, as `Evaluate.measure` does.
        restore: The model of the run's `TrainStep`, built in the same way. Or a `Loop`, made as in the run: it gets all
            variables of its step, also masters and an optimizer's averages. A run of a `ComposedStep` or of a step of
            your own needs a `Loop`.
        follow: Whether to wait for further checkpoints until the run reaches the goal of `Loop.run`, or an action ends
            it. A run that was stopped or killed is waited for. False: only the checkpoints that are there now.

    Returns:
        The numbers of each step that has a row, by step.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work, or if `evaluate` returns something else.
        CheckpointError: If the folder is not that of a run, or its checkpoints hold other variables.
        NotWritable: If the rows cannot be written, or another process evaluates this run.
    """
    assign = _assigning(evaluate, restore)
    place = check_run(folder, hint=", once it has begun. To wait for a run that has not, make its folder")
    place = place.parent if place.name == CHECKPOINTS else place
    there = {one.name for one in place.iterdir()}  # An empty folder may be that of a run that is to begin.
    may_begin = follow and (not there or {CHECKPOINTS, EVALUATIONS, ".lock"} & there)
    if not may_begin and not checkpoints.numbers(checkpoints_of(place)):
        raise CheckpointError(
            f"{folder}: no checkpoint. Name the folder that was given to hs.Checkpoint, or a run's --out."
        )
    path = place / EVALUATIONS
    with RunLocks([("evaluate_checkpoints", Place(path, "file"))]):
        rows = {row[STEP]: row for row in read_log(path)}
        with writing("evaluate_checkpoints", path):  # A kill may have left a part of a line.
            file = AppendFile(path, path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0)
        with contextlib.closing(file):
            marks = {step: row.get(MARK) for step, row in rows.items()}
            for step, mark in _restored(place, assign, marks, follow):
                rows[step] = {STEP: step, MARK: mark, **_numbers(evaluate(step), step)}
                with writing("evaluate_checkpoints", path):
                    file.add(f"{json.dumps(without_nan(rows[step]), allow_nan=False)}\n".encode())
    return {step: metrics_of(rows[step]) for step in sorted(rows)}


def _restored(
    place: pathlib.Path, assign: Callable[[str], None], marks: dict[int, str | None], follow: bool
) -> Iterator[tuple[int, str]]:
    """Restores each checkpoint without a known hash in `marks`, and yields its step and its hash."""
    quiet = 0
    while quiet < 2:  # Between two calls of `Loop.run` a program seems complete for a moment.
        where = checkpoints_of(place)
        there = [(number, checkpoints.prefix(where, number)) for number in reversed(checkpoints.numbers(where))]
        new = [(one, path) for one, path in there if one not in marks or _hash_of(path) not in (None, marks[one])]
        for number, path in new:
            mark, damage = _hash_of(path), None
            try:
                assign(path)
            except checkpoints.Damaged as error:
                damage = error
            after = _hash_of(path)
            if after is None:
                how = "For slow evaluations give hs.Checkpoint a larger keep=, or save less often."
                said = f"{path} was removed before it was evaluated: step {number} is skipped. {how}"
                warnings.warn(said, UserWarning, stacklevel=3)
            elif after == mark:  # Else it was replaced meanwhile, and is new once more.
                marks[number] = mark
                if damage:
                    warnings.warn(f"{path} is damaged ({damage}): step {number} is skipped.", UserWarning, stacklevel=3)
                else:
                    yield number, mark
        if not follow:
            return
        quiet = quiet + 1 if not new and is_complete(where) else 0
        if not new and quiet < 2:
            time.sleep(1.0)


def _hash_of(path: str) -> str | None:
    """A hash of a checkpoint's index, which has a checksum of each value; None if the checkpoint was removed."""
    try:
        return hashlib.sha256(pathlib.Path(f"{path}.index").read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return None


def _assigning(evaluate: object, restore: object) -> Callable[[str], None]:
    """How a checkpoint is restored into a model or a loop."""
    if not callable(evaluate):
        raise scaler.InvalidArgument(f"evaluate_checkpoints(evaluate={evaluate!r}): expected a function of the step.")
    if isinstance(restore, Loop):
        state = restore.state(restore.identity({}), actions=())
        objects = {name: one for name, one in state.trackables().items() if name in (*state.groups, "held")}
        return functools.partial(_assign, objects, state.check)
    if not isinstance(restore, keras.Model):
        raise scaler.InvalidArgument(
            f"evaluate_checkpoints(restore={restore!r}): expected the run's model, or an hs.Loop made as in the run."
        )
    own = [part for variable in restore.variables for part in components(variable)]
    return functools.partial(_assign, {"model": own}, functools.partial(_check_model, own))


def _check_model(own: list[tf.Variable], path: str, facts: Mapping) -> None:
    saved, here = facts["variables"], layout({"model": own})
    if "model" not in saved:
        raise CheckpointError(
            f"{path}: it does not say which of its variables are the model's, since its step is no hs.TrainStep. "
            "Give evaluate_checkpoints an hs.Loop made as in the run, as restore=."
        )
    replicas = facts["identity"].get("replicas", 1)
    others = [f"the run had {replicas} replicas: give restore= an hs.Loop with its strategy"] * (replicas != 1)
    check_layout(path, {"model": saved["model"]}, here, others)
    warn_of_places(path, {"model": saved["model"]}, here)


def _assign(objects: Mapping[str, Any], check: Callable[[str, Mapping], None], path: str) -> None:
    """Assigns the values of a checkpoint; nothing, if the check of its variables raises. `Damaged` if unreadable."""
    facts = checkpoints.read_facts(path, whole=False)
    check(path, facts)
    try:
        status = tf.train.Checkpoint(**objects).restore(path)
    except tf.errors.OpError as error:
        raise checkpoints.Damaged(reason(error)) from error
    status.assert_existing_objects_matched().expect_partial()


def _numbers(found: object, step: int) -> dict[str, float]:
    """The result of `evaluate`, as floats."""
    if isinstance(found, Mapping) and found and all(isinstance(name, str) for name in found):
        plain = not any(isinstance(value, (str, bytes)) or np.ndim(value) for value in found.values())
        with contextlib.suppress(TypeError, ValueError):
            if plain and not {STEP, MARK} & set(found):
                return {name: float(value) for name, value in found.items()}
    raise scaler.InvalidArgument(
        f"evaluate_checkpoints(evaluate=...): at step {step} it returned {repr(found)[:100]}: expected a dict of "
        f"numbers by name, such as {{'accuracy': 0.9}}, with other names than {STEP!r} and {MARK!r}."
    )
