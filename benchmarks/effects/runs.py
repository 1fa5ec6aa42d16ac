"""Networks of the tasks in training, by a `Loop` or again and again in one graph, and what counts of gradients say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops import tasks
from loops.loop.loop import Loop
from loops.loop.visit import Visit
from loops.step.train_step import TrainStep
from loops.tasks import ImageTask, TextTask

Task = TextTask | ImageTask

_PER_CALL = 20
"""Steps that a `Loop` takes at once."""
UNSCALED = scaler.DelayedAmax(1.0, history_length=1, min_scale=1.0, max_scale=1.0)
"""A scale of a tensor that has nowhere to go: 1."""


def text(**sizes: int) -> TextTask:
    """Python's own source, with another size of the transformer that reads it.

    Raises:
        loops.LoopError: If this Python was installed without its source.
    """
    return dataclasses.replace(tasks.load("text"), **sizes)


def held_out(task: Task) -> tuple[tf.Tensor, tf.Tensor]:
    """The held-out examples of a task and their labels."""
    if isinstance(task, ImageTask):
        return tf.constant(task.test_images), tf.constant(task.test_labels)
    size = task.test_examples * task.context
    characters = tf.constant(task.test_characters[: size + 1].astype(np.int32))
    inputs, following = (tf.reshape(part, [-1, task.context]) for part in (characters[:-1], characters[1:]))
    return inputs, following


class Trained(NamedTuple):
    """A network that was trained, the names of what was watched in it, and what each visit of the loop saw."""

    model: keras.Model
    names: Sequence[str]
    visits: list[Visit]


def trained(
    task: Task,
    seed: int,
    optimizer: keras.optimizers.Optimizer,
    steps: int,
    *,
    batch: int | None = None,
    kinds: Sequence[str] = (),
    every: int = 1,
) -> Trained:
    """Trains a task's network in float32.

    Args:
        task: The network and its data.
        seed: Determines initial weights and batches.
        optimizer: A new one.
        steps: The number of batches.
        batch: The examples of a step (default: the task's number).
        kinds: The tensors whose values are counted by exponent, as `scaler.observe.watch` names them.
        every: Counts on each so-manyth step.
    """
    keras.utils.set_random_seed(seed)
    model = task.model("float32")
    watch = scaler.observe.watch(model, kinds=kinds, every=every) if kinds else None
    loss_scaler = scaler.LossScaler(scaler.NoScaling())
    step = TrainStep(model, task.loss, optimizer, loss_scaler=loss_scaler, probes=watch)
    visits: list[Visit] = []
    data = task.dataset(batch or task.batch_size, seed)
    Loop(step, data, steps_per_call=min(_PER_CALL, steps), actions=[visits.append]).run(steps)
    return Trained(model, watch.names if watch else (), visits)


class Traced:
    """A `TrainStep` that is traced once for all seeds, and whose runs can all begin anew.

    Args:
        model: The network.
        loss: Of labels and outputs.
        optimizer: Chooses the updates.
        strategy: Chooses the loss scale.
        options: Of `TrainStep`.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Callable,
        optimizer: keras.optimizers.Optimizer,
        strategy: scaler.Strategy,
        **options: Any,
    ):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler.LossScaler(strategy)
        self.step = TrainStep(model, loss, optimizer, loss_scaler=self.scaler, **options)
        self._start: list[np.ndarray] = []

    def begin(self, take: Callable, *given: Any) -> None:
        """Puts all variables to what they were before the first step: weights, slots, scales, moving statistics.

        Args:
            take: A `tf.function` of steps, which is traced here if it was not before.
            given: Its arguments.
        """
        take.get_concrete_function(*given)
        if not self._start:
            self._start = self.values()
        self.put(self._start)

    @property
    def variables(self) -> list:
        """The variables of the model, the optimizer and the scaler."""
        return [*self.model.variables, *self.optimizer.variables, *self.scaler.variables]

    def values(self) -> list[np.ndarray]:
        """What all variables hold."""
        return [tf.convert_to_tensor(variable).numpy() for variable in self.variables]

    def put(self, values: list[np.ndarray]) -> None:
        """Puts what `values` returned back."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)


def nonzero(counts: np.ndarray) -> np.ndarray:
    """The number of values other than zero, at least 1, of counts [seeds, bins]."""
    return np.maximum(counts.sum(axis=1) - counts[:, scaler.observe.ZERO], 1)


def by_exponent(counts: np.ndarray, exponents: range) -> np.ndarray:
    """The shares of non-zero values, [exponents, seeds]."""
    return np.array([counts[:, scaler.observe.bin_of(exponent)] / nonzero(counts) for exponent in exponents])


def flushed(counts: np.ndarray, to: str, scale: float = 1.0) -> np.ndarray:
    """The share of non-zero values that a format makes zero at a scale, [seeds]."""
    known = scaler.float_format(to)
    lost = np.array([scaler.observe.cast(each, known, scale).underflow.low for each in counts])
    return lost * counts.sum(axis=1) / nonzero(counts)


def visible(shares: np.ndarray) -> np.ndarray:
    """Without those that a logarithmic axis does not have."""
    return np.where(shares > 0, shares, np.nan)
