"""The user's model with what it is trained by, and steps made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.policies import in_float32
from loops.diagnose.memory.slots import copy_of
from loops.step.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Program:
    """What is examined.

    Attributes:
        name: As it was named, for errors.
        model: Built.
        loss: As `TrainStep` takes it.
        optimizer: A Keras optimizer without a loss scaler around it, or a function.
        strategy: The loss scaler's, or None where none was chosen.
        settings: Further arguments of its `TrainStep`.
        batch: The first one, of tensors.
        dataset: Where batches come from; None where a batch was given.
        compiled: Whether XLA compiles the whole step, as `Loop(jit_compile=True)` has it.
        steps_per_call: As its `Loop` has it.
    """

    name: str
    model: keras.Model
    loss: Callable[..., Any]
    optimizer: Any
    strategy: Any
    settings: Mapping[str, Any]
    batch: Any
    dataset: tf.data.Dataset | None
    compiled: bool = False
    steps_per_call: int = 1

    @property
    def has_masters(self) -> bool:
        """Whether 16-bit weights are trained through masters."""
        return not self.settings.get("allow_16bit_updates", False)

    def step(self, *, as_it_is: bool = True, jit_compile: bool | None = None) -> TrainStep:
        """A step of its own, with a new optimizer and loss scaler.

        Args:
            as_it_is: False where the dtype policy is another one: the loss scaler is then the usual one for it.
            jit_compile: As for `TrainStep`; the program's own if None.
        """
        settings = {**self.settings, **({} if jit_compile is None else {"jit_compile": jit_compile})}
        keras_one = isinstance(self.optimizer, keras.optimizers.Optimizer)
        chosen = as_it_is and self.strategy is not None
        return TrainStep(
            self.model,
            in_float32(self.loss),
            copy_of(self.optimizer) if keras_one else self.optimizer,
            loss_scaler=scaler.LossScaler(self.strategy) if chosen else None,
            **settings,
        )
