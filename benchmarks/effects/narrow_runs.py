"""Runs of one small network in an emulated format, traced once for all seeds; a run is one call of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.step.train_step import TrainStep
from loops.tasks import ImageTask, TextTask

Task = TextTask | ImageTask


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        rounding: What `scaler.formats.emulated` returns, or None for float32.
        compiled: Whether XLA compiles all steps. It makes them several times as fast, but not random numbers.
    """

    rounding: scaler.formats.Emulated | None
    compiled: bool = True


class NarrowRuns:
    """A `TrainStep` of a task's network in one way.

    Args:
        way: How it is trained.
        task: The network and its data.
        steps: The steps of each run.
        rate: Adam's learning rate.
        batch: The examples of a step.
    """

    def __init__(self, way: Way, task: Task, steps: int, rate: float, batch: int):
        self._task, self._steps, self._batch = task, steps, batch
        self._model = task.model("float32")
        if way.rounding is not None:
            way.rounding(self._model)
        self._optimizer = keras.optimizers.Adam(rate)
        # A variable, so that one graph is for all factors.
        self._factor = tf.Variable(1.0, trainable=False)
        self._step = TrainStep(
            self._model,
            lambda labels, outputs: self._factor * task.loss(labels, outputs),
            self._optimizer,
            loss_scaler=scaler.LossScaler(scaler.NoScaling()),
        )
        self._take = tf.function(self._taken, autograph=True, jit_compile=way.compiled)
        self._test = tf.function(lambda inputs, labels: task.loss(labels, self._model(inputs)))
        self._fresh: list[tuple[tf.Variable, np.ndarray]] = []

    def run(self, seed: int, weights: Sequence[np.ndarray], factor: float = 1.0) -> float:
        """Trains from these weights and returns the held-out loss in the end, in nats.

        Args:
            seed: Determines the batches, which are the same for every way.
            weights: What the trainable variables begin with.
            factor: Of the loss in training. Adam's steps are the same for any, but for rounding and its epsilon.
        """
        # A shuffle depends on TensorFlow's seed besides its own.
        keras.utils.set_random_seed(seed)
        stacked = next(iter(self._task.dataset(self._batch, seed).batch(self._steps, drop_remainder=True)))
        self._begin(stacked)
        for variable, value in zip(self._model.trainable_variables, weights, strict=True):
            variable.assign(value)
        self._factor.assign(factor)
        self._take(stacked)
        return float(self._test(*held_out(self._task)))

    def _begin(self, stacked: Any) -> None:
        """Puts every variable to what it was before the first step: slots, scales of tensors, moving statistics."""
        self._take.get_concrete_function(stacked)
        if not self._fresh:
            variables = [*self._model.variables, *self._optimizer.variables, *self._step.loss_scaler.variables]
            self._fresh = [(variable, tf.convert_to_tensor(variable).numpy()) for variable in variables]
        for variable, value in self._fresh:
            variable.assign(value)

    def _taken(self, stacked: Any) -> None:
        """All steps, on batches [steps, batch, ...]."""
        for number in tf.range(self._steps):
            self._step(tf.nest.map_structure(lambda part, number=number: part[number], stacked))


def first_weights(task: Task, seed: int) -> list[np.ndarray]:
    """What the trainable variables of a task's network begin with."""
    keras.utils.set_random_seed(seed)
    return [tf.convert_to_tensor(variable).numpy() for variable in task.model("float32").trainable_variables]


def held_out(task: Task) -> tuple[tf.Tensor, tf.Tensor]:
    """The held-out examples and their labels."""
    if isinstance(task, ImageTask):
        return tf.constant(task.test_images), tf.constant(task.test_labels)
    size = task.test_examples * task.context
    text = tf.constant(task.test_characters[: size + 1].astype(np.int32))
    inputs, following = (tf.reshape(part, [-1, task.context]) for part in (text[:-1], text[1:]))
    return inputs, following
