"""A lower learning rate, of an optimizer that has a number or a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from loops.backend.steps import schedule as made_with


class Part(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule's rate times a number.

    Args:
        schedule: Of the optimizer.
        part: The number.
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule, part: float):
        self._schedule, self._part = schedule, part

    def __call__(self, step: Any) -> Any:
        """The rate at a step."""
        return self._schedule(step) * self._part


@contextlib.contextmanager
def slower(optimizer: keras.optimizers.Optimizer, part: float) -> Iterator[None]:
    """Has an optimizer learn at a part of its rate. A rate that is a variable is for others to put back.

    Args:
        optimizer: Of the step.
        part: Between 0 and 1.
    """
    schedule = made_with(optimizer)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        optimizer.learning_rate = float(optimizer.learning_rate) * part
        yield
        return
    optimizer.learning_rate = Part(schedule, part)
    try:
        yield
    finally:
        optimizer.learning_rate = schedule
