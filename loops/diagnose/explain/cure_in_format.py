"""Finds the fewest layers that must stay out of a narrower format at a past step, measured by the step's gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts, Progress, attempts_at
from loops.diagnose.explain.cure import called_in, minimal, models_of
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.graph.changes import layers_in_float32, without_advice
from loops.loop.loop import Loop
from loops.step.parts import parts_in
from loops.support.errors import LoopError

_MOST = 0.5
"""The largest error over the norm, whatever the noise: beyond it the gradients point elsewhere."""


@dataclasses.dataclass(frozen=True)
class FormatCure:
    """Which layers may compute in a format at a step, and which must not.

    Gradients about which different loss scalers decide, such as those of the parts of a `loops.ComposedStep`, are
    judged apart, each by its own norm and noise. Then each number here is that of the gradients that it moves the
    nearest to their limit, or the furthest beyond it.

    Attributes:
        format: The format of weights and activations.
        left_out: The paths of the layers that must stay out of it, in the order of the model.
        inside: The paths of those that may be in it together.
        error: How far those move the gradients of all weights, over their norm.
        noise: How far the gradients of one batch lie from those of the data, about, over their norm.
        limit: How far they may move: the noise, but by no more than half of the norm.
        alone: How far each layer alone moves them, by path.
        may_alone: Of those left out the ones that may be in it if no other layer is.
        parts: If there are several scalers, the same numbers for each, by its part or its name.
        joint: The names of the parts about which one scaler decides, if there are several.
        not_tried: Layers that the step does not show, by path, with a sentence that says why.
        models: The names with which paths begin, if there are several models.
    """

    format: str
    left_out: list[str]
    inside: list[str]
    error: float
    noise: float
    limit: float
    alone: dict[str, float]
    may_alone: list[str] = dataclasses.field(default_factory=list)
    parts: dict[str, PartInFormat] = dataclasses.field(default_factory=dict)
    joint: list[str] = dataclasses.field(default_factory=list)
    not_tried: dict[str, str] = dataclasses.field(default_factory=dict)
    models: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class PartInFormat:
    """What a format does to the gradients about which one of several scalers decides; as in a `FormatCure`.

    Attributes:
        error: How far the layers that are inside together move these gradients, over their norm.
        noise: Their noise.
        limit: How far they may move.
        alone: How far each layer alone moves them, by path.
    """

    error: float
    noise: float
    limit: float
    alone: dict[str, float]


@without_advice()
def find_format_cure(
    loop: Loop,
    step: int,
    format: str,
    *,
    run: str | os.PathLike | None = None,
    progress: Progress = lambda text: None,
) -> FormatCure:
    """Finds a smallest set of layers to leave out, so that the others may compute in a format at this step.

    They may if their rounding moves the step's gradients by no more than the noise of the batch does, and by less than
    half of their norm. The noise is the deviation of the gradients of up to five neighbouring batches. Every float16
    layer computes in float32, and delayed scaling is measured as current scaling. Gradients of several scalers are
    judged apart: none may move too far. A layer that the step does not call, or whose part does not have its turn, is
    neither in nor out.

    Args:
        loop: The loop of the run, before its first step.
        step: The number of the step, from 1.
        format: As of `scaler.formats.emulated`.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        progress: Called now and then with a text that says what is done.

    Raises:
        scaler.InvalidArgument: For another format, a step that the run did not take, or a model without such layers.
        LoopError: If the run cannot be restored, or the step's gradients cannot be compared.
    """
    gradients = _Gradients(attempts_at(loop, step, run, progress), scaler.formats.emulated(format))
    paths, moved = gradients.paths, functools.cache(gradients.moved)
    if not paths:
        reasons = " ".join(dict.fromkeys(gradients.not_tried.values()))
        raise LoopError(f"step {step}: no layer can be tried in {format}. {reasons}")

    def may(inside: Iterable[str]) -> bool:
        """What is NaN is not within the limit."""
        return all(one.error <= one.limit for one in moved(frozenset(inside)).values())

    def others(left_out: Iterable[str]) -> list[str]:
        return [path for path in paths if path not in left_out]

    left_out = minimal(paths, lambda chosen: may(others(chosen))) or []
    together = moved(frozenset(others(left_out)))
    alone = {path: moved(frozenset([path])) for path in paths}
    each = {
        name: dataclasses.replace(one, alone={path: found[name].error for path, found in alone.items()})
        for name, one in together.items()
    }
    worst = max(together.values(), key=_strain)
    return FormatCure(
        format,
        left_out,
        others(left_out),
        worst.error,
        worst.noise,
        worst.limit,
        {path: max(found.values(), key=_strain).error for path, found in alone.items()},
        [path for path in left_out if may([path])],
        each if len(each) > 1 else {},
        gradients.joint,
        gradients.not_tried,
        gradients.prefixes,
    )


def _strain(one: PartInFormat) -> float:
    """How near gradients come to their limit, or how far they lie beyond it."""
    if math.isnan(one.error):
        return math.inf
    return one.error / one.limit if one.limit else math.inf if one.error else 0.0


class _Gradients:
    """The gradients of a step with some of its layers in a format, without the loss scale.

    Those of each loss scaler are a vector of their own.

    Args:
        attempts: The attempts at the step.
        emulated: The format.

    Attributes:
        paths: The layers that can be in it; of several models each path begins with the model's name.
        not_tried: Those of which this step shows nothing, by path, with a sentence that says why.
        joint: The names of the parts about which one scaler decides, if there are several.
        prefixes: The names of the models, if there are several.

    Raises:
        scaler.InvalidArgument: If no model has a layer that can be in the format.
        LoopError: If the gradients cannot be seen, or no model is found.
    """

    def __init__(self, attempts: Attempts, emulated: scaler.formats.Emulated):
        self._attempts, self._emulated = attempts, emulated
        step = attempts.moment.train_step
        if attempts.moment.replicas > 1:
            raise LoopError("a format is tried on one device: build the loop without a tf.distribute strategy.")
        if not attempts.scalers:
            raise LoopError(
                "the step uses no loss scaler, through which its gradients are seen: give it "
                "hs.LossScaler(hs.NoScaling())."
            )
        called = called_in(attempts)
        self._models = models_of(attempts, called)
        layers = [(model, path, layer) for model in self._models for path, layer in emulated.layers_of(model).items()]
        if not layers:
            raise scaler.InvalidArgument(
                f"{emulated.format}: expected a model with a Dense, EinsumDense, Conv1D, Conv2D, Conv3D or "
                "MultiHeadAttention layer. A subclass that replaces their call is left alone."
            )
        used = {id(model): model.name for model, _, _ in layers}
        self.prefixes = list(used.values()) if len(used) > 1 else []
        self._layers = [
            (f"{model.name}/{path}" if self.prefixes else path, model, path, layer) for model, path, layer in layers
        ]
        why = {name: _why_not(layer, called, attempts.moment) for name, _, _, layer in self._layers}
        self.not_tried = {name: reason for name, reason in why.items() if reason is not None}
        self.paths = [name for name in why if name not in self.not_tried]
        parts = parts_in(step)
        self.joint = [part.name for part in parts] if len(parts) > 1 and step.loss_scaler is not None else []
        self._whole, self._noise = self._of_neighbours() if self.paths else ({}, {})

    def moved(self, inside: frozenset[str]) -> dict[str, PartInFormat]:
        """How far the gradients of each scaler move with these layers in the format."""
        found, parts = self._whole, {}
        if inside:
            with self._traced(inside) as take:
                found = take(self._attempts.moment.batch)
        for name, whole in self._whole.items():
            norm = max(float(np.linalg.norm(whole)), float(np.finfo(np.float32).tiny))
            noise, error = self._noise[name] / norm, float(np.linalg.norm(found[name] - whole)) / norm
            parts[name] = PartInFormat(error, noise, min(noise, _MOST), {})
        return parts

    def _of_neighbours(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """The gradients of the step in float32, and the deviation of those of batches next to it.

        Raises:
            LoopError: If there is no second batch of the same shapes.
        """
        moment = self._attempts.moment
        near = [one for one in (*moment.before, moment.next_batch) if one is not None]
        shapes = tf.nest.map_structure(tf.type_spec_from_value, moment.batch)
        alike = [one for one in near if tf.nest.map_structure(tf.type_spec_from_value, one) == shapes]
        batches = [moment.batch, *alike]
        if len(batches) < 2:
            raise LoopError(
                "the noise of a batch is known from a second one of the same shapes, and none lies next to this step: "
                "choose another step."
            )
        with self._traced(frozenset()) as take:
            found = [take(batch) for batch in batches]
        if not found[0]:
            raise LoopError(f"step {moment.step}: no loss scaler was given gradients in it: choose another step.")
        if not all(np.all(np.isfinite(one)) for one in found[0].values()):
            raise LoopError(
                f"step {moment.step}: its gradients are not finite with every float16 layer in float32 either, so that "
                "no format can be compared with them: choose another step."
            )
        together = {name: np.stack([one[name] for one in found]) for name in found[0]}
        return found[0], {name: float(np.linalg.norm(one.std(axis=0, ddof=1))) for name, one in together.items()}

    @contextlib.contextmanager
    def _traced(self, inside: frozenset[str]) -> Iterator[Callable[[Any], dict[str, np.ndarray]]]:
        attempts, moment, names = self._attempts, self._attempts.moment, _names_of_scalers(self._attempts)

        def taken(batch: Any) -> dict[str, list[tf.Tensor]]:
            attempts.take_inlined(batch)
            # What is unscaled beside an `apply` is that of a penalty. A step that only unscales has one scaler.
            taken = calls.applied or calls.gradients
            owners = calls.owners or attempts.scalers[:1] * len(taken)
            found: dict[str, list[tf.Tensor]] = {}
            for grads, owner in zip(taken, owners, strict=True):
                found.setdefault(names[id(owner)], []).extend(
                    tf.cast(tf.convert_to_tensor(grad), tf.float32) / owner.loss_scale
                    for grad in grads
                    if grad is not None
                )
            return found

        with contextlib.ExitStack() as stack:
            stack.enter_context(attempts.as_it_was())
            for model in self._models:
                stack.enter_context(layers_in_float32(scaler.observe.layers_of(model)))
                only = [path for name, owner, path, _ in self._layers if owner is model and name in inside]
                if only:
                    stack.enter_context(self._emulated.tried(model, only))
            calls = stack.enter_context(recording_scaler_calls(attempts.scalers, moves=False))
            try:
                traced = tf.function(taken, jit_compile=moment.jit_compile or None).get_concrete_function(moment.batch)
            except (TypeError, ValueError) as error:
                if "out of scope" not in str(error):
                    raise
                raise LoopError(
                    "the step takes its gradients inside of a tf.function of its own, where they cannot be read: take "
                    "that decorator away, since a Loop compiles the step itself."
                ) from None

            def take(batch: Any) -> dict[str, np.ndarray]:
                attempts.progress()
                moment.reset()
                return {
                    name: np.concatenate([np.ravel(one) for one in grads] or [np.zeros(0, np.float32)])
                    for name, grads in traced(batch).items()
                }

            yield take


def _why_not(layer: keras.layers.Layer, called: Mapping[int, keras.layers.Layer], moment: Any) -> str | None:
    """Why this step shows nothing of a layer, or None."""
    step, own = moment.train_step, {id(variable) for variable in layer.variables}
    owners = [part for part in parts_in(step) if any(id(variable) in own for variable in part.variables)]
    turns = [(step.nearest_turn(part), part.name) for part in owners]
    if turns and all(calls for calls, _ in turns):
        calls, name = turns[0]
        had = "had it" if calls < 0 else "has it first"
        return f"Part {name!r} does not have its turn at step {moment.step}: at step {moment.step + calls} it {had}."
    return None if id(layer) in called else f"Step {moment.step} does not call it."


def _names_of_scalers(attempts: Attempts) -> dict[int, str]:
    """What each scaler's gradients are called: by the part of a `ComposedStep`, or by the scaler's own name."""
    step = attempts.moment.train_step
    found = {id(one): name for name, one in step.scalers.items()} if parts_in(step) else {}
    for one in attempts.scalers:
        if id(one) not in found:
            names = itertools.chain([str(one.name)], (f"{one.name}:{number}" for number in itertools.count(2)))
            found[id(one)] = next(name for name in names if name not in found.values())
    return found
