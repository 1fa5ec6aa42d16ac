"""The variables that an optimizer was built for, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaler.backend import replicas


class Order:
    """Finds variables again, whether Keras's or TensorFlow's inside of them are given.

    Args:
        variables: Those that an optimizer is built for.
    """

    def __init__(self, variables: Sequence = ()):
        self._variables = list(variables)
        self._positions = {id(replicas.native(variable)): index for index, variable in enumerate(variables)}
        self._updated: set[int] = set()

    @property
    def variables(self) -> list:
        """As they were given."""
        return list(self._variables)

    def position(self, variable: Any) -> int | None:
        """Where a variable stands; None for another one."""
        return self._positions.get(id(replicas.native(variable)))

    def has_gradient(self, position: int) -> None:
        """Notes that a step had a gradient for a variable."""
        self._updated.add(position)

    def updates(self, variable: Any) -> bool:
        """Whether a step so far, as far as it was traced, had a gradient for the variable."""
        return self.position(variable) in self._updated
