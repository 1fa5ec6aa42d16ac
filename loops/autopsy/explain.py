"""The autopsy of a past step, or of a whole run."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable

import tensorflow as tf

import scaler
from loops.autopsy.attempts import Attempts
from loops.autopsy.changes import in_policy
from loops.autopsy.explanation import Explanation
from loops.autopsy.health import Health, health
from loops.autopsy.look import look
from loops.autopsy.minimal import minimal
from loops.autopsy.models import models_of
from loops.autopsy.paths import units
from loops.errors import LoopError
from loops.loop import Loop
from loops.rewind.log import read_log
from loops.rewind.replay import log_of, rewind

_COURSE = 10
"""Steps before the one explained in which a lower learning rate may keep the weights from going bad."""
Progress = Callable[[str], object]


def explain(
    loop: Loop, step: int | None = None, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> Explanation:
    """Explains why a step was skipped, by taking it again.

    Args:
        loop: As the program made it, with the run's `Checkpoint` among its actions; nothing is written, and no action
            acts. It is used up.
        step: Counted from 1 in batches, as the log counts. Without it the log is looked at: the step in which what went
            wrong last began, or the run is told to be healthy.
        run: The folder with the log `steps.jsonl`, where the loop has no `JsonLines`.
        progress: Called now and then with what is done.

    Raises:
        scaler.InvalidArgument: For a step that the run did not take, or a loop that cannot be rewound.
        LoopError: If the run cannot be had again.
    """
    found = None
    if step is None:
        found = health(read_log(log_of(loop, None if run is None else pathlib.Path(run))))
        step = found.step or found.steps
        if not step:
            raise LoopError(
                "there is no log of the run to choose a step from: name one with step= (on the command line --step), "
                "or have the run write a log, with loops.JsonLines."
            )
    moment = rewind(
        loop, step, run=None if run is None else pathlib.Path(run), at_least=_COURSE, progress=_steps(progress)
    )
    explanation = look(moment, _counted(progress), remedies=found is None or not found.healthy)
    return _judged(explanation, found) if found else explanation


def cure(
    loop: Loop, step: int, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> list[str] | None:
    """The smallest set of layers that must compute in float32 for a step to pass.

    It is smallest in that none of its layers can be left out. It is found by delta debugging, with the step taken again
    for each set, forward and backward.

    Args:
        loop: As for `explain`.
        step: As for `explain`.
        run: As for `explain`.
        progress: As for `explain`.

    Returns:
        The layers' paths, in the order of the model; an empty list where the step passes as it is, and None where it
        does not pass with every layer in float32 either.
    """
    moment = rewind(loop, step, run=None if run is None else pathlib.Path(run), progress=_steps(progress))
    attempts = Attempts(moment, _counted(progress))
    models = models_of(moment.train_step)
    if not models:
        raise LoopError("the train step names no Keras model: give it one as its attribute `model`.")
    if not math.isfinite(attempts.as_run().loss):
        attempts.lower_from = attempts.loss_scale
    narrow = {
        path: [one for one in scaler.observe.layers_of(layer) if one.compute_dtype in ("float16", "bfloat16")]
        for path, layer in units(models).items()
    }
    narrow = {path: inside for path, inside in narrow.items() if inside}

    def passes(paths: list[str]) -> bool:
        try:
            return attempts.take(in_policy([one for path in paths for one in narrow[path]], "float32")).finite
        except (TypeError, ValueError, tf.errors.OpError):
            return False  # A layer that adds what two others give takes no two dtypes.

    return minimal(list(narrow), passes)


def _judged(explanation: Explanation, found: Health) -> Explanation:
    if not found.healthy:
        return explanation
    # A look at the step may know better than the log, which has no causes of some programs.
    if explanation.verdict not in ("healthy", "overflow"):
        return explanation
    if explanation.verdict != "healthy" and explanation.fits_at is None:
        return explanation
    if found.skips:
        told = (
            f"Nothing is wrong: {found.skips} of the {found.steps} steps in the log were skipped"
            + (f", {found.at_start} of them while the scale found its level" if found.at_start else "")
            + f". The last was step {explanation.step}, which passes at a loss scale of {explanation.fits_at:g}."
        )
    else:
        told = f"Nothing is wrong: none of the {found.steps} steps in the log was skipped."
    if explanation.differs:
        told += f" The replay is not the run: {explanation.differs}"
    return dataclasses.replace(explanation, verdict="healthy", sentence=told)


def _steps(progress: Progress) -> Callable[[int, int], object]:
    return lambda done, total: progress(f"replayed {done} of {total} steps")


def _counted(progress: Progress) -> Callable[[], None]:
    taken = 0

    def told() -> None:
        nonlocal taken
        taken += 1
        progress(f"took the step {taken} times")

    return told
