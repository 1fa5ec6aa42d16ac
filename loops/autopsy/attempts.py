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
from loops.autopsy.listening import Heard, listening
from loops.autopsy.models import owned_by_parts
from loops.decisions import find
from loops.resume.variables import variable_groups
from loops.step.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a step did.

    Attributes:
        finite: Whether it was applied.
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
        moves: Whether it takes the update to see what helps: where the gradients are finite before it.
        windowed: Whether the step is a micro-batch of a window.
        own_variables: Floating-point variables of the step that belong to no model, optimizer or scaler.
    """

    def __init__(self, moment: Any, progress: Callable[[], None] = lambda: None):
        self.moment = moment
        self.taken = 0
        self.moves = False
        self._progress = progress
        self.step = as_python(moment.take)
        self.windowed = isinstance(moment.train_step, TrainStep) and moment.train_step.window is not None
        self._functions: list[Callable] = []
        self._factor = tf.Variable(1.0, trainable=False)
        self._at_factor: Callable | None = None
        with self.as_it_was():
            concrete = self._compiled(Heard()).get_concrete_function(moment.batch)
        own = getattr(moment.train_step, "loss_scaler", None)
        found = list(find(concrete).scalers)
        self.scalers: list[scaler.LossScaler] = found or ([own] if own is not None else [])
        owned = owned_by_parts(moment.train_step)
        self.own_variables = [
            one
            for one in variable_groups(moment.train_step, concrete).get("step", [])
            if one.dtype.is_floating and id(one) not in owned and scaler.LossScaler.owner_of(one) is None
        ]

    def take(self, change: Any = None, batch: Any = None, *, moves: bool | None = None) -> Attempt:
        """Takes the step once.

        Args:
            change: A context manager that changes something and puts it back.
            batch: In the place of the step's own.
            moves: Whether finite gradients are applied. Else it is seen that they are finite, and that is all.
                Default: the attribute.
        """
        moves = self.moves if moves is None else moves
        with self.as_it_was(), change or contextlib.nullcontext(), listening(self.scalers, moves=moves) as heard:
            return self._taken(self._compiled(heard), self.moment.batch if batch is None else batch)

    def take_at(self, factor: float) -> Attempt:
        """Takes the step once with gradients as large as at so many times its loss scale.

        Args:
            factor: As for `listening`.
        """
        with self.as_it_was(), listening(self.scalers, self._factor, moves=False) as heard:
            self._factor.assign(factor)
            if self._at_factor is None:
                self._at_factor = self._compiled(heard)
            return self._taken(self._at_factor, self.moment.batch)

    def _taken(self, step: Callable, batch: Any) -> Attempt:
        self.taken += 1
        self._progress()
        before = [int(one.counters.applied) for one in self.scalers]
        returned, finite = step(batch)
        outputs = {name: value.numpy() for name, value in returned.items()}
        after = [int(one.counters.applied) for one in self.scalers]
        known = [bool(one) for one in finite] or [then < now for then, now in zip(before, after, strict=True)]
        return Attempt(_finite(outputs, known), float(outputs.get("loss", np.nan)), outputs)

    def _compiled(self, heard: Heard) -> Any:
        # TensorFlow warns of one function that is traced again and again, and knows functions by their place in memory.
        def taken(batch: Any) -> tuple[Any, list]:
            outputs = self.step(batch)
            return outputs, [] if "applied" in outputs else heard.finite

        self._functions.append(taken)
        return tf.function(taken)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Begins with the state before the step, and ends with it. A micro-batch is a step of its own inside."""
        step = self.moment.train_step
        self.moment.reset()
        try:
            with traced_anew(step), with_value(step, "window", None) if self.windowed else contextlib.nullcontext():
                yield
        finally:
            self.moment.reset()


def _finite(outputs: dict, known: Sequence[bool]) -> bool:
    if "applied" in outputs:
        return bool(outputs["applied"])
    if known:
        return all(known)
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
