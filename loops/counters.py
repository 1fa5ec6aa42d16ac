"""What a loop counts."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts since the loop was made.

    Attributes:
        data: Batches taken from the dataset: calls of the train step. `Loop.run` counts in these.
        attempted: Steps on which a decision was taken: fewer than `data` where gradients are accumulated.
        applied: Attempted steps that moved the weights.
    """

    data: int = 0
    attempted: int = 0
    applied: int = 0

    @property
    def skipped(self) -> int:
        """Attempted steps that changed nothing, because a gradient was not finite."""
        return self.attempted - self.applied


class CounterVariables(tf.Module):
    """The counts on the device, where a call of many steps that breaks off has still counted those it finished."""

    def __init__(self):
        super().__init__(name="counters")
        self.data = _count("data")
        self.attempted = _count("attempted")
        self.applied = _count("applied")

    def add(self, outputs: dict[str, tf.Tensor]) -> None:
        """Counts one call of a train step by its outputs, when they are there.

        A step that reports no `attempted` is taken to have decided, and one that reports no `applied` to have
        applied.
        """
        with tf.control_dependencies([tf.convert_to_tensor(value) for value in outputs.values()]):
            attempted = outputs.get("attempted", True)
            self.data.assign_add(1)
            self.attempted.assign_add(tf.cast(attempted, tf.int64))
            self.applied.assign_add(tf.cast(outputs.get("applied", attempted), tf.int64))

    def read(self) -> Counters:
        """The counts, on the host."""
        return Counters(int(self.data), int(self.attempted), int(self.applied))


def _count(name: str) -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name=name)
