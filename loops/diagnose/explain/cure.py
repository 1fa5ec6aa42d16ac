"""Finds the fewest layers that must compute in float32 for a past step to pass, by Zeller's ddmin."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

import scaler
from loops.diagnose.advice import without_advice
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.blame import losses_of_applied
from loops.diagnose.explain.cure_in_format import find_format_cure
from loops.diagnose.explain.examples import minimal
from loops.diagnose.explain.explain import Progress, attempt_progress, replay_progress
from loops.diagnose.explain.found_models import called_in, models_of
from loops.diagnose.explain.lower_scales import passes_at_none
from loops.diagnose.explain.scan_results import failing, was_skipped
from loops.diagnose.explain.shares import at_share_to_blame
from loops.diagnose.explain.worth import absurd_loss
from loops.diagnose.graph.changes import in_policy
from loops.diagnose.graph.models import units
from loops.loop.loop import Loop
from loops.run.rewind.rewind import rewind
from loops.support.errors import LoopError
from loops.support.text import one_line


@dataclasses.dataclass(frozen=True)
class Cure:
    """The layers that make a step pass in float32.

    Attributes:
        layers: The paths of the layers that must compute in float32, in the order of the model; empty if the step
            passes as it is. None if there is no such set, or if it could not be determined.
        known: Whether the answer is certain. False if float32 could not be tried.
        why: Why there is no such set, or why it could not be determined; None if there is one.
        at_scale: The lower loss scale that the step needs as well, or None.
        untried: The paths of layers that cannot run in float32, and were left as they are.
        no_help: Why the step passes and does not train usefully, as a clause; None if nothing is known against it.
    """

    layers: list[str] | None
    known: bool = True
    why: str | None = None
    at_scale: float | None = None
    untried: tuple[str, ...] = ()
    no_help: str | None = None


def cure(
    loop: Loop,
    step: int,
    *,
    format: str | None = None,
    run: str | os.PathLike | None = None,
    progress: Progress = lambda text: None,
) -> list[str] | None:
    """Finds the smallest set of layers that must compute in float32 for a step to pass, or stay out of a format.

    None of its layers can be left out. It is found by delta debugging, which repeats the step for each set, forward and
    backward. A step that is finite neither as it ran nor at any lower loss scale is repeated at a loss scale of 1,
    where an overflow caused by the loss scale cannot hide anything.

    With `format` the layers are those that must not be emulated in it: all others together move the gradients of this
    step by no more than the noise of the batch does, and by less than half of their norm.

    Args:
        loop: The loop of the run, with its `Checkpoint` and its log among the actions, before its first step.
        step: The number of the step, from 1.
        format: As of `scaler.formats.emulated`, such as "float8_e4m3fn". Default: float32 is what is asked about.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        progress: Called now and then with a text that says what is done.

    Returns:
        The layers' paths, in the order of the model. Empty if the step passes as it is, or wholly in the format; None
        if it does not pass even with every layer in float32.

    Raises:
        scaler.InvalidArgument: For a step that the run did not take, a loop that cannot be rewound, or another format.
        LoopError: If the run cannot be restored, float32 could not be tried, or the gradients cannot be compared.
    """
    if format is not None:
        return find_format_cure(loop, step, format, run=run, progress=progress).left_out
    found = find_cure(loop, step, run=run, progress=progress)
    if not found.known:
        raise LoopError(f"step {step}: {found.why}")
    return found.layers


@without_advice()
def find_cure(
    loop: Loop, step: int, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> Cure:
    """Finds the same layers as `cure`, and the reason if there are none.

    Args:
        loop: The loop of the run, before its first step.
        step: The number of the step, from 1.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        progress: Called now and then with a text that says what is done.
    """
    moment = rewind(loop, step, run=None if run is None else pathlib.Path(run), progress=replay_progress(progress))
    attempts = Attempts(moment, attempt_progress(progress))
    # A step on replicas is traced for each of them, and its layers are those that it names.
    models = models_of(attempts, called_in(attempts) if moment.replicas == 1 else {})
    _, as_run = failing(moment, attempts)
    if moment.replicas > 1 and not as_run.finite:
        _, as_run = at_share_to_blame(moment, attempts, as_run)
    if as_run.finite and was_skipped(moment):
        why = "The run's log says that it was skipped, but in the replay it is finite: `halfstep explain` says more."
        return Cure(None, known=False, why=why)
    lost = as_run.cause is scaler.Cause.LOSS
    if lost or (not as_run.finite and passes_at_none(attempts)):
        attempts.lower_from = attempts.loss_scale
    narrow = {
        path: [one for one in scaler.observe.layers_of(layer) if one.compute_dtype in ("float16", "bfloat16")]
        for path, layer in units(models).items()
    }
    trials = _Trials(attempts, {path: inside for path, inside in narrow.items() if inside})
    found = _found(trials)
    if not found.layers:
        return found
    return dataclasses.replace(found, no_help=absurd_loss(trials.loss(found.layers), losses_of_applied(moment)))


class _Trials:
    """Repeats a step with sets of layers in float32.

    Args:
        attempts: The attempts at the step.
        narrow: The 16-bit layers of each unit that gets one dtype, by the unit's path.
    """

    def __init__(self, attempts: Attempts, narrow: Mapping[str, Sequence[keras.layers.Layer]]):
        self.paths = list(narrow)
        self._attempts, self._narrow = attempts, narrow
        self._errors: dict[frozenset[str], str] = {}
        self._scales: dict[frozenset[str], float | None] = {}
        self._losses: dict[frozenset[str], float] = {}

    def passes(self, paths: Sequence[str]) -> bool:
        """Whether the step passes with these layers in float32. A set that does not run does not pass."""
        key = frozenset(paths)
        try:
            attempt = self._attempts.take(in_policy([one for path in paths for one in self._narrow[path]], "float32"))
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion) as error:
            # A layer that adds two inputs fails if their dtypes differ.
            self._errors[key] = one_line(error)
            return False
        self._scales[key], self._losses[key] = attempt.at_scale, attempt.loss
        return attempt.finite

    def error(self, paths: Sequence[str]) -> str | None:
        """The error of a set that could not be run, or None."""
        return self._errors.get(frozenset(paths))

    def loss(self, paths: Sequence[str]) -> float:
        """The loss with a set that passed; NaN if the step returns none."""
        return self._losses.get(frozenset(paths), math.nan)

    def at_scale(self, paths: Sequence[str]) -> float | None:
        """The lower loss scale at which a set passed, or None."""
        return self._scales.get(frozenset(paths))


def _found(trials: _Trials) -> Cure:
    layers = minimal(trials.paths, trials.passes)
    if layers is not None:
        return Cure(layers, at_scale=trials.at_scale(layers))
    error = trials.error(trials.paths)
    if error is None:
        return Cure(None, why="It does not pass with every layer in float32 either.")
    return _found_without_untried(trials, error)


def _found_without_untried(trials: _Trials, error: str) -> Cure:
    """The cure among the layers that run in float32, if not all of them do."""
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
