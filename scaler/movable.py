"""A variable whose value may lie elsewhere for a while."""

from __future__ import annotations

from typing import Protocol

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable


class Keeper(Protocol):
    """What holds values of variables."""

    def restore(self) -> None:
        """Puts them back, at this point of the program or of the graph that is traced."""

    def assigned(self, after: tf.Operation | tf.Tensor) -> None:
        """Notes an assignment in the graph that is traced, of a value that was put back."""


class MovableVariable(ResourceVariable):
    """TensorFlow's variable, whose value a keeper may hold until somebody asks for it.

    TensorFlow reads and assigns through the handle, and so do checkpoints.

    Attributes:
        keeper: Who may hold the value, or None.
        captured: Whether a graph was traced before there was a keeper: it reads or assigns without asking.
    """

    keeper: Keeper | None = None
    captured = False

    @property
    def handle(self) -> tf.Tensor:
        """TensorFlow's handle of the variable, which holds its value now."""
        if self.keeper is not None:
            self.keeper.restore()
        elif not tf.executing_eagerly():
            self.captured = True
        return self._handle

    @property
    def device(self) -> str:
        """Where the value is, without asking for it."""
        return self._handle.device

    def assign(self, value, use_locking=None, name=None, read_value=True):
        """As TensorFlow's."""
        return self._noted(super().assign(value, use_locking, name, read_value), read_value)

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        """As TensorFlow's."""
        return self._noted(super().assign_add(delta, use_locking, name, read_value), read_value)

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        """As TensorFlow's."""
        return self._noted(super().assign_sub(delta, use_locking, name, read_value), read_value)

    def _lazy_read(self, op):
        # What all assignments return that are to be read, scattered ones too.
        self._noted(op, read=False)
        return super()._lazy_read(op)

    def _noted(self, assignment, read: bool):
        if not read and self.keeper is not None and not tf.executing_eagerly():
            self.keeper.assigned(assignment)
        return assignment

    def _distributed_container(self) -> tf.Variable:
        """What Keras knows it by: asked here, it does not look at the handle for that."""
        return self


def make_movable(variable: tf.Variable) -> None:
    """Has a variable ask for its value from now on, if it is one that can: not one of several replicas."""
    if isinstance(variable, BaseResourceVariable):
        variable.__class__ = MovableVariable


def is_free(variable: tf.Variable) -> bool:
    """Whether a keeper may take the value."""
    return type(variable) is MovableVariable and variable.keeper is None and not variable.captured
