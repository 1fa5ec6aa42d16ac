"""A variable whose value may lie elsewhere for a while."""

from __future__ import annotations

from typing import Protocol

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable


class Keeper(Protocol):
    """What holds values of variables."""

    def restore(self) -> None:
        """Puts them back, at this point of the program or of the graph that is traced."""


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
