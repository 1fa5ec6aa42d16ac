"""Taking one step again with something changed, and everything put back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.autopsy.listening import listening
from loops.autopsy.models import owned_by_parts
from loops.decisions import find
from loops.resume.variables import variable_groups
from loops.step.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a step did.

    Attributes:
        finite: Whether it was applied, or, in a window that is not whole, its gradients were finite.
        loss: The loss, NaN where the step returns none.
        outputs: All that it returned, as numbers.
    """

    finite: bool
    loss: float
    outputs: dict[str, Any]


class Attempts:
    """Takes the step that a `Moment` stands before.

    Attributes:
        moment: The moment.
        scalers: The loss scalers that the step moves.
        taken: How many attempts were made.
        own_variables: Floating-point variables of the step that belong to no model, optimizer or scaler.
    """

    def __init__(self, moment: Any, progress: Callable[[], None] = lambda: None):
        self.moment = moment
        self.taken = 0
        self._progress = progress
        self.step = as_python(moment.take)
        with self._as_it_was():
            concrete = tf.function(self.step).get_concrete_function(moment.batch)
        own = getattr(moment.train_step, "loss_scaler", None)
        found = list(find(concrete).scalers)
        self.scalers: list[scaler.LossScaler] = found or ([own] if own is not None else [])
        owned = owned_by_parts(moment.train_step)
        self.own_variables = [
            one
            for one in variable_groups(moment.train_step, concrete).get("step", [])
            if one.dtype.is_floating and id(one) not in owned and scaler.LossScaler.owner_of(one) is None
        ]

    def take(self, change: Any = None, batch: Any = None, factor: float = 1.0) -> Attempt:
        """Takes the step once.

        Args:
            change: A context manager that changes something and puts it back.
            batch: In the place of the step's own.
            factor: As for `listening`.
        """
        self.taken += 1
        self._progress()
        batch = self.moment.batch if batch is None else batch
        with self._as_it_was(), change or contextlib.nullcontext(), listening(self.scalers, factor):
            before = [int(one.counters.applied) for one in self.scalers]
            outputs = {name: value.numpy() for name, value in tf.function(self.step)(batch).items()}
            after = [int(one.counters.applied) for one in self.scalers]
        return Attempt(_finite(outputs, before, after), float(outputs.get("loss", np.nan)), outputs)

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        self.moment.reset()
        try:
            with traced_anew(self.moment.train_step):
                yield
        finally:
            self.moment.reset()


def _finite(outputs: dict, before: Sequence[int], after: Sequence[int]) -> bool:
    if "applied" in outputs:
        return bool(outputs["applied"])
    if before:
        return all(then < now for then, now in zip(before, after, strict=True))
    return bool(np.isfinite(outputs.get("loss", np.nan)))


def as_python(take: Any) -> Callable:
    """A step without the `tf.function` around it, which would keep its first trace."""
    return getattr(take, "python_function", take)


@contextlib.contextmanager
def traced_anew(train_step: Any) -> Iterator[None]:
    """Has a `TrainStep` forget the forward and backward pass that XLA compiled for it, for a while."""
    with train_step.retraced() if isinstance(train_step, TrainStep) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def in_policy(layers: Iterable[keras.layers.Layer], policy: str) -> Iterator[None]:
    """Has layers compute under another dtype policy, with the variables that they have."""
    before = [(layer, layer.dtype_policy) for layer in layers]
    try:
        for layer, _ in before:
            layer.dtype_policy = policy
        yield
    finally:
        for layer, own in before:
            layer.dtype_policy = own


@contextlib.contextmanager
def with_value(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Has an attribute another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
