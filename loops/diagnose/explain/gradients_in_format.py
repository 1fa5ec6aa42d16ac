"""The gradients of a past step with some of its layers in a narrower format, and how far these move them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.found_models import called_in, models_of
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.graph.changes import layers_in_float32
from loops.step.parts import Part, parts_in
from loops.support.errors import LoopError

MOST = 0.5
"""The largest error over the norm, whatever the noise: beyond it the gradients point elsewhere."""


class Moved(NamedTuple):
    """How far gradients move, over their norm.

    Attributes:
        error: How far.
        noise: How far those of one batch lie from those of the data, about.
        limit: How far they may move.
    """

    error: float
    noise: float
    limit: float


class GradientsInFormat:
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
        if attempts.moment.replicas > 1:
            raise LoopError("a format is tried on one device: build the loop without a tf.distribute strategy.")
        if not attempts.scalers:
            raise LoopError(
                "the step uses no loss scaler, through which its gradients are seen: give it "
                "hs.LossScaler(hs.NoScaling())."
            )
        called = called_in(attempts)
        self._models = models_of(attempts, called)
        layers = {id(model): emulated.layers_of(model) for model in self._models}
        several = sum(map(bool, layers.values())) > 1
        self.prefixes = [model.name for model in self._models if layers[id(model)]] if several else []
        names = {id(model): {self._name(model, path): path for path in layers[id(model)]} for model in self._models}
        if not any(names.values()):
            raise scaler.InvalidArgument(
                f"{emulated.format}: expected a model with a Dense, EinsumDense, Conv1D, Conv2D, Conv3D or "
                "MultiHeadAttention layer. A subclass that replaces their call is left alone."
            )
        why = {
            name: self._why_not(layers[id(model)][path], called)
            for model in self._models
            for name, path in names[id(model)].items()
        }
        self.not_tried = {name: reason for name, reason in why.items() if reason is not None}
        self.paths = [name for name in why if name not in self.not_tried]
        self._of = names
        self.joint = self._joint()
        self._whole, self._noise = self._of_neighbours() if self.paths else ({}, {})

    def _name(self, model: keras.layers.Layer, path: str) -> str:
        return f"{model.name}/{path}" if self.prefixes else path

    def _why_not(self, layer: keras.layers.Layer, called: Mapping[int, keras.layers.Layer]) -> str | None:
        """Why this step shows nothing of a layer, or None."""
        step, number = self._attempts.moment.train_step, self._attempts.moment.step
        owners = _owners(layer, parts_in(step))
        turns = [(step.nearest_turn(part), part.name) for part in owners]
        if turns and all(calls for calls, _ in turns):
            calls, name = turns[0]
            had = "had it" if calls < 0 else "has it first"
            return f"Part {name!r} does not have its turn at step {number}: at step {number + calls} it {had}."
        return None if id(layer) in called else f"Step {number} does not call it."

    def _joint(self) -> list[str]:
        step = self._attempts.moment.train_step
        parts = parts_in(step)
        return [part.name for part in parts] if len(parts) > 1 and step.loss_scaler is not None else []

    def _names_of_scalers(self) -> dict[int, str]:
        """What each scaler's gradients are called: by the part of a `ComposedStep`, or by the scaler's own name."""
        step = self._attempts.moment.train_step
        found = {id(one): name for name, one in step.scalers.items()} if parts_in(step) else {}
        for one in self._attempts.scalers:
            if id(one) not in found:
                taken, name, number = set(found.values()), str(one.name), 1
                while name in taken:
                    number += 1
                    name = f"{one.name}:{number}"
                found[id(one)] = name
        return found

    def moved(self, inside: frozenset[str]) -> dict[str, Moved]:
        """How far the gradients of each scaler move with these layers in the format."""
        found = self._whole if not inside else self._taken(inside)
        return {name: self._moved(name, one) for name, one in found.items()}

    def _moved(self, name: str, found: np.ndarray) -> Moved:
        whole = self._whole[name]
        norm = max(float(np.linalg.norm(whole)), float(np.finfo(np.float32).tiny))
        noise = self._noise[name] / norm
        return Moved(float(np.linalg.norm(found - whole)) / norm, noise, min(noise, MOST))

    def _of_neighbours(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """The gradients of the step in float32, and the deviation of those of batches next to it.

        Raises:
            LoopError: If there is no second batch of the same shapes.
        """
        moment = self._attempts.moment
        near = [one for one in (*moment.before, moment.next_batch) if one is not None]
        batches = [moment.batch, *(one for one in near if _specs(one) == _specs(moment.batch))]
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
        return found[0], {name: _deviation([one[name] for one in found]) for name in found[0]}

    def _taken(self, inside: frozenset[str]) -> dict[str, np.ndarray]:
        with self._traced(inside) as take:
            return take(self._attempts.moment.batch)

    @contextlib.contextmanager
    def _traced(self, inside: frozenset[str]) -> Iterator[Callable[[Any], dict[str, np.ndarray]]]:
        attempts, moment, names = self._attempts, self._attempts.moment, self._names_of_scalers()

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
                only = [path for name, path in self._of[id(model)].items() if name in inside]
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


def _owners(layer: keras.layers.Layer, parts: Sequence[Part]) -> list[Part]:
    """The parts that move weights of the layer."""
    own = {id(variable) for variable in layer.variables}
    return [part for part in parts if any(id(variable) in own for variable in part.variables)]


def _deviation(found: list[np.ndarray]) -> float:
    mean = np.mean(found, axis=0)
    squares = sum(float(np.linalg.norm(one - mean)) ** 2 for one in found)
    return float(np.sqrt(squares / (len(found) - 1)))


def _specs(batch: Any) -> Any:
    return tf.nest.map_structure(tf.type_spec_from_value, batch)
