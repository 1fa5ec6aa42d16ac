"""The variables that an optimizer was built for, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaler.backend import replicas


class Order:
    """Finds the position of a variable, given as Keras's variable or as TensorFlow's inside it.

    Args:
        variables: The variables that an optimizer is built for.
    """

    def __init__(self, variables: Sequence = ()):
        self._variables = list(variables)
        self._positions = {id(replicas.native(variable)): index for index, variable in enumerate(variables)}
        self._updated: set[int] = set()

    @property
    def variables(self) -> list:
        """The variables in the given order."""
        return list(self._variables)

    def position(self, variable: Any) -> int | None:
        """The position of a variable, or None if the optimizer was not built for it."""
        return self._positions.get(id(replicas.native(variable)))

    def has_gradient(self, position: int) -> None:
        """Records that a step had a gradient for the variable at this position."""
        self._updated.add(position)

    def updates(self, variable: Any) -> bool:
        """Whether any step traced so far had a gradient for the variable."""
        return self.position(variable) in self._updated
