"""Finds the fewest layers that must stay out of a narrower format at a past step, measured by the step's gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.advice import without_advice
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.explain import Progress, attempt_progress, replay_progress
from loops.diagnose.explain.minimal import minimal
from loops.diagnose.graph.models import models_in_step
from loops.diagnose.graph.policies import layers_in_float32
from loops.diagnose.graph.scaler_calls import recording_scaler_calls
from loops.loop.loop import Loop
from loops.run.rewind.rewind import rewind
from loops.support.errors import LoopError

MOST = 0.5
"""The largest error over the norm, whatever the noise: beyond it the gradients point elsewhere."""


@dataclasses.dataclass(frozen=True)
class FormatCure:
    """Which layers may compute in a format at a step, and which must not.

    Attributes:
        format: The format of weights and activations.
        left_out: The paths of the layers that must stay out of it, in the order of the model.
        inside: The paths of those that may be in it together.
        error: How far those move the gradients of all weights, over their norm.
        noise: How far the gradients of one batch lie from those of the data, about, over their norm.
        limit: How far they may move: the noise, but by no more than half of the norm.
        alone: How far each layer alone moves them, by path.
    """

    format: str
    left_out: list[str]
    inside: list[str]
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
    layer computes in float32, and delayed scaling is measured as current scaling.

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
    emulated = scaler.formats.emulated(format)
    moment = rewind(loop, step, run=None if run is None else pathlib.Path(run), progress=replay_progress(progress))
    gradients = _Gradients(Attempts(moment, attempt_progress(progress)), emulated)
    whole, noise = gradients.of_neighbours()
    norm = max(float(np.linalg.norm(whole)), float(np.finfo(np.float32).tiny))
    limit = min(noise / norm, MOST)
    errors: dict[frozenset[str], float] = {frozenset(): 0.0}

    def error(inside: Sequence[str]) -> float:
        key = frozenset(inside)
        if key not in errors:
            errors[key] = float(np.linalg.norm(gradients.of(key) - whole)) / norm
        return errors[key]

    def others(left_out: Sequence[str]) -> list[str]:
        return [path for path in gradients.paths if path not in left_out]

    # What is NaN is not within the limit.
    left_out = minimal(gradients.paths, lambda chosen: error(others(chosen)) <= limit) or []
    inside = others(left_out)
    alone = {path: error([path]) for path in gradients.paths}
    return FormatCure(format, left_out, inside, error(inside), noise / norm, limit, alone)


class _Gradients:
    """The gradients of a step with some of its layers in a format, as one vector, without the loss scale.

    Args:
        attempts: The attempts at the step.
        emulated: The format.

    Attributes:
        paths: The layers that can be in it; of several models each path begins with the model's name.
    """

    def __init__(self, attempts: Attempts, emulated: scaler.formats.Emulated):
        self._attempts, self._emulated = attempts, emulated
        if attempts.moment.replicas > 1:
            raise LoopError("a format is tried on one device: build the loop without a tf.distribute strategy.")
        if not attempts.scalers:
            raise LoopError(
                "the step uses no loss scaler, through which its gradients are seen: give it "
                "scaler.LossScaler(scaler.NoScaling())."
            )
        self._models = models_in_step(attempts.moment.train_step)
        self._of = {
            id(model): {self._name(model, path): path for path in emulated.layers_of(model)} for model in self._models
        }
        self.paths = [name for names in self._of.values() for name in names]
        if not self.paths:
            raise scaler.InvalidArgument(
                f"{emulated.format}: expected a model with a Dense, EinsumDense, Conv1D, Conv2D, Conv3D or "
                "MultiHeadAttention layer. A subclass that replaces their call is left alone."
            )

    def _name(self, model: keras.layers.Layer, path: str) -> str:
        return f"{model.name}/{path}" if len(self._models) > 1 else path

    def of_neighbours(self) -> tuple[np.ndarray, float]:
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
        mean = np.mean(found, axis=0)
        squares = sum(float(np.linalg.norm(one - mean)) ** 2 for one in found)
        return found[0], float(np.sqrt(squares / (len(batches) - 1)))

    def of(self, inside: frozenset[str]) -> np.ndarray:
        """The gradients of the step with these layers in the format."""
        with self._traced(inside) as take:
            return take(self._attempts.moment.batch)

    @contextlib.contextmanager
    def _traced(self, inside: frozenset[str]) -> Iterator[Callable[[Any], np.ndarray]]:
        attempts, moment = self._attempts, self._attempts.moment

        def taken(batch: Any) -> list[tf.Tensor]:
            attempts.take_inlined(batch)
            # What is unscaled beside an `apply` is that of a penalty. A step that only unscales has one scaler.
            taken = calls.applied or calls.gradients
            owners = calls.owners or attempts.scalers[:1] * len(taken)
            return [
                tf.cast(tf.convert_to_tensor(grad), tf.float32) / owner.loss_scale
                for grads, owner in zip(taken, owners, strict=True)
                for grad in grads
                if grad is not None
            ]

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

            def take(batch: Any) -> np.ndarray:
                attempts.progress()
                moment.reset()
                found = traced(batch)
                return np.concatenate([np.ravel(one) for one in found] or [np.zeros(0, np.float32)])

            yield take


def _specs(batch: Any) -> Any:
    return tf.nest.map_structure(tf.type_spec_from_value, batch)
