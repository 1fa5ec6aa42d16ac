"""Runs that differ in their seed alone, with one trace of their step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from loops.loop.loop import Loop
from loops.loop.state.variables import variable_groups
from loops.loop.visit import Action
from loops.run.train import RunOptions, build, model_of
from loops.step.train_step import TrainStep
from loops.tasks import Task


class SharedTrace:
    """Builds loops as `build` does, one after the other, and traces their step once.

    A later loop has the variables of the first, with the values that its own seed gives them. So a run must be over
    before the next is built, and a step whose trace depends on the seed cannot be shared: of the tasks here none has
    one.
    """

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._task: Task | None = None
        self._key: tuple = ()
        self._first: list[tuple[tf.Variable, tf.Tensor]] = []

    def build(
        self, task: Task, options: RunOptions, actions: Callable[[keras.Model], Iterable[Action]], **settings: Any
    ) -> Loop:
        """The loop of a run before its first step. Arguments are those of `build`, the same but for the seed."""
        key = (dataclasses.replace(options, seed=0), settings)
        # Tasks hold arrays, which do not compare as one.
        if self._loop is None or self._task is not task or self._key != key:
            self._loop, self._task, self._key = build(task, options, actions, **settings), task, key
            groups = variable_groups(self._loop.train_step, self._loop.calls.trace())
            self._first = [(one, tf.identity(one)) for group in groups.values() for one in group]
            return self._loop
        step = self._loop.train_step
        assert isinstance(step, TrainStep)
        for variable, value in self._first:
            variable.assign(value)
        keras.utils.set_random_seed(options.seed)
        for variable, fresh in zip(step.model.variables, model_of(task, options).variables, strict=True):
            variable.assign(fresh)
        # The scaler looks back over its counters, which are zero again.
        step.loss_scaler.check()
        self._loop.restart(task.dataset(options.batch_size, options.seed), actions(step.model))
        return self._loop

    def forget(self) -> None:
        """Has the next loop built and traced again."""
        self._loop = None
