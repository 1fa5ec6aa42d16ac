"""Which layers must compute in float32 for a past step to pass."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

import scaler
from loops.diagnose.advice import without_advice
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.explain import Progress, counted, of_steps
from loops.diagnose.explain.look import failing, was_skipped
from loops.diagnose.explain.lower_scales import passes_at_none
from loops.diagnose.explain.minimal import minimal
from loops.diagnose.explain.shares import at_share_to_blame
from loops.diagnose.graph.changes import in_policy
from loops.diagnose.graph.models import models_of, units
from loops.loop.loop import Loop
from loops.run.rewind.rewind import rewind
from loops.support.errors import LoopError
from loops.support.text import one_line


@dataclasses.dataclass(frozen=True)
class Cure:
    """What float32 does for a step.

    Attributes:
        layers: The paths of the layers that must compute in float32, in the order of the model; empty where the step
            passes as it is. None where there is no such set, or nobody knows.
        known: Whether that is an answer. False where float32 could not be tried.
        why: Why there is no such set, or why nobody knows; None where there is one.
        at_scale: The lower loss scale that the step needs beside, or None.
        untried: The layers that cannot be run in float32, and were left as they are.
    """

    layers: list[str] | None
    known: bool = True
    why: str | None = None
    at_scale: float | None = None
    untried: tuple[str, ...] = ()


def cure(
    loop: Loop, step: int, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> list[str] | None:
    """The smallest set of layers that must compute in float32 for a step to pass.

    It is smallest in that none of its layers can be left out. It is found by delta debugging, with the step taken again
    for each set, forward and backward. A step that is finite neither as it ran nor at any lower loss scale is taken at
    a loss scale of 1, where an overflow of its own scale hides nothing.

    Args:
        loop: The run's, with its `Checkpoint` and its log among the actions, before its first step.
        step: The number of the step, from 1 on.
        run: The folder with the log `steps.jsonl`, where the loop has no `JsonLines`.
        progress: Called now and then with what is done.

    Returns:
        The layers' paths, in the order of the model; an empty list where the step passes as it is, and None where it
        does not pass with every layer in float32 either.

    Raises:
        scaler.InvalidArgument: As for `explain`.
        LoopError: As for `explain`, and if float32 could not be tried.
    """
    found = find_cure(loop, step, run=run, progress=progress)
    if not found.known:
        raise LoopError(f"step {step}: {found.why}")
    return found.layers


@without_advice()
def find_cure(
    loop: Loop, step: int, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> Cure:
    """As `cure`, with why there is none.

    Args:
        loop: The run's, as `cure` takes it.
        step: The number of the step, from 1 on.
        run: The folder with the log, as `cure` takes it.
        progress: Called now and then with what is done.
    """
    moment = rewind(loop, step, run=None if run is None else pathlib.Path(run), progress=of_steps(progress))
    attempts = Attempts(moment, counted(progress))
    models = models_of(moment.train_step)
    if not models:
        raise LoopError("the train step names no Keras model: give it one as its attribute `model`.")
    _, as_run = failing(moment, attempts)
    if moment.replicas > 1 and not as_run.finite:
        _, as_run = at_share_to_blame(moment, attempts, as_run)
    if as_run.finite and was_skipped(moment):
        why = "The run's log says that it was skipped, and taken again it is finite: `halfstep explain` says more."
        return Cure(None, known=False, why=why)
    lost = as_run.cause is scaler.Cause.LOSS
    if lost or (not as_run.finite and passes_at_none(attempts)):
        attempts.lower_from = attempts.loss_scale
    narrow = {
        path: [one for one in scaler.observe.layers_of(layer) if one.compute_dtype in ("float16", "bfloat16")]
        for path, layer in units(models).items()
    }
    return _found(_Trials(attempts, {path: inside for path, inside in narrow.items() if inside}))


class _Trials:
    """The step with sets of layers in float32.

    Args:
        attempts: Of the step.
        narrow: The 16-bit layers by the path of what is changed as a whole.
    """

    def __init__(self, attempts: Attempts, narrow: Mapping[str, Sequence[keras.layers.Layer]]):
        self.paths = list(narrow)
        self._attempts, self._narrow = attempts, narrow
        self._errors: dict[frozenset[str], str] = {}
        self._scales: dict[frozenset[str], float | None] = {}

    def passes(self, paths: Sequence[str]) -> bool:
        """Whether it passes with these in float32. What cannot be run does not."""
        key = frozenset(paths)
        try:
            attempt = self._attempts.take(in_policy([one for path in paths for one in self._narrow[path]], "float32"))
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion) as error:
            # A layer that adds what two others give takes no two dtypes.
            self._errors[key] = one_line(error)
            return False
        self._scales[key] = attempt.at_scale
        return attempt.finite

    def error(self, paths: Sequence[str]) -> str | None:
        """Why a set that was asked for could not be run, or None."""
        return self._errors.get(frozenset(paths))

    def at_scale(self, paths: Sequence[str]) -> float | None:
        """The lower scale at which a set passed, or None."""
        return self._scales.get(frozenset(paths))


def _found(trials: _Trials) -> Cure:
    layers = minimal(trials.paths, trials.passes)
    if layers is not None:
        return Cure(layers, at_scale=trials.at_scale(layers))
    error = trials.error(trials.paths)
    if error is None:
        return Cure(None, why="It does not pass with every layer in float32 either.")
    return _without_those_that_cannot(trials, error)


def _without_those_that_cannot(trials: _Trials, error: str) -> Cure:
    """With the layers in float32 that can be, where all together cannot."""
    untried = tuple(path for path in trials.paths if not trials.passes([path]) and trials.error([path]))
    rest = [path for path in trials.paths if path not in untried]
    layers = minimal(rest, trials.passes) if untried else None
    if layers is not None:
        return Cure(layers, at_scale=trials.at_scale(layers), untried=untried)
    if not rest or trials.error(rest) or not untried:
        return Cure(None, False, f"The layers could not be tried in float32: {error}", untried=untried)
    names = ", ".join(repr(path) for path in untried)
    why = f"It does not pass with every other layer in float32, and {names} could not be tried:"
    return Cure(None, False, f"{why} {trials.error(untried[:1])}", untried=untried)
