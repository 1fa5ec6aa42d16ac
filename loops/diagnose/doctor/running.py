"""Steps as they are timed: traced for the program's batch, and done when the device is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from loops.diagnose.doctor.program import Program
from loops.step.train_step import TrainStep
from loops.support.errors import OutOfData

STEPS_A_CALL = 20
"""Of a call that takes several."""


class Running:
    """A traced step. It holds what it was traced with, such as a dtype policy that is another one by now.

    Args:
        program: Whose batches it takes.
        step: A step of its model.
        many: Whether a call takes the batch `STEPS_A_CALL` times in the graph.
    """

    def __init__(self, program: Program, step: TrainStep, *, many: bool = False):
        self._batch = program.batch
        self._times = step.accumulate
        self.skipped = self.attempted = 0
        function: Any = tf.function(step, jit_compile=program.compiled or None)
        if many:
            self._times, function = 1, tf.function(_many(function))
        self._call = function.get_concrete_function(tf.nest.map_structure(tf.type_spec_from_value, program.batch))

    def __call__(self, batch: Any = None) -> None:
        """Takes a step, of as many micro-batches as it has."""
        for _ in range(self._times):
            outputs = self._call(self._batch if batch is None else batch)
        attempted, applied = bool(outputs["attempted"]), bool(outputs["applied"])
        tf.test.experimental.sync_devices()
        self.attempted += attempted
        self.skipped += attempted and not applied


def _many(step: Callable) -> Callable:
    def many(batch: Any) -> dict[str, tf.Tensor]:
        nothing = (tf.constant(0), tf.constant(False), tf.constant(False))

        def body(taken: tf.Tensor, *_: tf.Tensor) -> tuple:
            outputs = step(batch)
            return taken + 1, tf.convert_to_tensor(outputs["attempted"]), tf.convert_to_tensor(outputs["applied"])

        _, attempted, applied = tf.while_loop(lambda taken, *_: taken < STEPS_A_CALL, body, nothing)
        return {"attempted": attempted, "applied": applied}

    return many


@dataclasses.dataclass
class Batches:
    """Batches of a dataset, again from its beginning where it ends; those of another shape than the first are left out.

    Attributes:
        dataset: Where they come from.
        like: A batch of the wanted shape.
    """

    dataset: tf.data.Dataset
    like: Any

    def __post_init__(self) -> None:
        self._iterator: Iterator[Any] = iter(self.dataset)
        self._shapes = _shapes(self.like)

    def next(self) -> Any:
        """One batch, with the parts of the wanted one.

        Raises:
            OutOfData: If the whole dataset has none, as one has that cannot be read twice.
        """
        for _ in range(2):
            for found in self._iterator:
                batch = tuple(found)
                if _shapes(batch) == self._shapes:
                    return batch
            self._iterator = iter(self.dataset)
        raise OutOfData(
            "the dataset gave no further batch of the shape of its first one: expected one that can be read again from "
            "its beginning, such as of tensors or files."
        )


def _shapes(batch: Any) -> list:
    return [one.shape for one in tf.nest.flatten(batch)]
