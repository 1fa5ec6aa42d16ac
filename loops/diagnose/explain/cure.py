"""Finds the fewest layers that must compute in float32 for a past step to pass."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts, Progress, attempts_at
from loops.diagnose.explain.case import narrow_of
from loops.diagnose.explain.measured import at_share_to_blame, failing, passes_at_none, was_skipped
from loops.diagnose.explain.trials import absurd_loss, losses_of_applied
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.graph.changes import in_policy, with_value, without_advice
from loops.diagnose.graph.models import models_in_step, outermost, units
from loops.loop.loop import Loop
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
        from loops.diagnose.explain.cure_in_format import find_format_cure

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
    attempts = attempts_at(loop, step, run, progress)
    moment = attempts.moment
    # A step on replicas is traced for each of them, and its layers are those that it names.
    models = models_of(attempts, called_in(attempts) if moment.replicas == 1 else {})
    _, as_run = failing(attempts)
    if moment.replicas > 1 and not as_run.finite:
        _, as_run = at_share_to_blame(attempts, as_run)
    if as_run.finite and was_skipped(moment):
        why = "The run's log says that it was skipped, but in the replay it is finite: `halfstep explain` says more."
        return Cure(None, known=False, why=why)
    lost = as_run.cause is scaler.Cause.LOSS
    if lost or (not as_run.finite and passes_at_none(attempts)):
        attempts.lower_from = attempts.loss_scale
    narrow = {path: narrow_of(scaler.observe.layers_of(layer)) for path, layer in units(models).items()}
    return _found(attempts, {path: inside for path, inside in narrow.items() if inside})


def _found(attempts: Attempts, narrow: Mapping[str, Sequence[keras.layers.Layer]]) -> Cure:
    """The cure among units that get one dtype, by path, each with its 16-bit layers."""
    passed: dict[frozenset[str], Attempt] = {}
    refused: dict[frozenset[str], str] = {}

    @functools.cache
    def tried(paths: frozenset[str]) -> bool:
        layers = [one for path in narrow if path in paths for one in narrow[path]]
        try:
            passed[paths] = attempts.take(in_policy(layers, "float32"))
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion) as error:
            # A layer that adds two inputs fails if their dtypes differ.
            refused[paths] = one_line(error)
            return False
        return passed[paths].finite

    def passes(paths: Iterable[str]) -> bool:
        return tried(frozenset(paths))

    untried: tuple[str, ...] = ()
    layers, every = minimal([*narrow], passes), frozenset(narrow)
    if layers is None and every not in refused:
        return Cure(None, why="It does not pass with every layer in float32 either.")
    if layers is None:
        # The cure among the layers that run in float32, if not all of them do.
        untried = tuple(path for path in narrow if not passes([path]) and frozenset([path]) in refused)
        rest = [path for path in narrow if path not in untried]
        layers = minimal(rest, passes) if untried else None
        if layers is None and (not rest or frozenset(rest) in refused):
            return Cure(None, False, f"The layers could not be tried in float32: {refused[every]}", untried=untried)
        if layers is None:
            names = ", ".join(repr(path) for path in untried)
            why = f"It does not pass with every other layer in float32, and {names} could not be tried:"
            return Cure(None, False, f"{why} {refused[frozenset(untried[:1])]}", untried=untried)
    found = passed[frozenset(layers)]
    no_help = absurd_loss(found.loss, losses_of_applied(attempts.moment)) if layers else None
    return Cure(layers, at_scale=found.at_scale, untried=untried, no_help=no_help)


def called_in(attempts: Attempts) -> dict[int, keras.layers.Layer]:
    """The layers that a step on one device calls, by id, seen while it is traced; one stands before those it calls."""
    called: dict[int, keras.layers.Layer] = {}
    original = keras.layers.Layer.__call__

    @functools.wraps(original)
    def recorded(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        called.setdefault(id(layer), layer)
        return original(layer, *args, **kwargs)

    recording = recording_scaler_calls(attempts.scalers, moves=False)
    with attempts.as_it_was(), recording, with_value(keras.layers.Layer, "__call__", recorded):
        tf.function(attempts.take_inlined).get_concrete_function(attempts.moment.batch)
    return called


def models_of(attempts: Attempts, called: Mapping[int, keras.layers.Layer]) -> list[keras.layers.Layer]:
    """The outermost models and layers that a step names or calls, those that it names first.

    Args:
        attempts: The attempts at the step.
        called: From `called_in`.

    Raises:
        LoopError: If there are none.
    """
    found = outermost([*models_in_step(attempts.moment.train_step), *called.values()])
    if not found:
        raise LoopError(
            "the train step names no Keras model, and no call of a Keras layer was seen in it: give the step its "
            "model as its attribute `model`, as in step.model = model."
        )
    return found


_Item = TypeVar("_Item")


def minimal(items: Sequence[_Item], passes: Callable[[list[_Item]], bool]) -> list[_Item] | None:
    """Finds a minimal set that passes, by Zeller's ddmin: without any one of its items it does not.

    Args:
        items: The candidates.
        passes: Whether a set passes; called once for each set.

    Returns:
        The set, in the order of `items`; None if not even all of them together pass.
    """

    @functools.cache
    def asked(chosen: tuple[int, ...]) -> bool:
        return passes([items[place] for place in chosen])

    if asked(()):
        return []
    chosen = tuple(range(len(items)))
    if not asked(chosen):
        return None
    parts = 2
    while len(chosen) > 1:
        size = -(-len(chosen) // parts)
        pieces = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        rests = [tuple(one for one in chosen if one not in piece) for piece in pieces]
        smaller = next((one for one in (*pieces, *rests) if len(one) < len(chosen) and asked(one)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(parts - 1, 2)
            chosen = smaller
        elif parts >= len(chosen):
            break
        else:
            parts = min(2 * parts, len(chosen))
    return [items[place] for place in chosen]
