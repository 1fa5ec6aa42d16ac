"""What the optimizers of a step under `protect` tell it: that they run, and for which variables."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any

from scaler.backend import replicas
from scaler.errors import InvalidArgument

_OPEN: contextvars.ContextVar[tuple[ProtectedStep, ...]] = contextvars.ContextVar("protected_steps", default=())


class ProtectedStep:
    """The train step of a model, for as long as the model lives.

    Args:
        name: The model's name.
    """

    def __init__(self, name: str):
        self._name = name
        self._known: set[int] = set()
        self._updated: set[int] = set()

    @contextlib.contextmanager
    def open(self, optimizers: Iterable) -> Iterator[None]:
        """While this is open, `optimizers` may apply gradients, and no other `LossScaleOptimizer`."""
        self._known = {id(optimizer) for optimizer in optimizers}
        token = _OPEN.set((*_OPEN.get(), self))
        try:
            yield
        finally:
            _OPEN.reset(token)

    def updates(self, variable: Any) -> bool:
        """Whether a `LossScaleOptimizer` had a gradient for the variable in this step."""
        return id(replicas.native(variable)) in self._updated

    def _note(self, optimizer: Any, variables: Iterable) -> None:
        if id(optimizer) not in self._known:
            raise InvalidArgument(
                f"protect: the train step of model {self._name!r} applies gradients with the LossScaleOptimizer "
                f"{optimizer.name!r}, which protect did not find before the step. Its skips would put nothing back, "
                "and skips of the others would take back what it had applied. Before the first step make it an "
                "attribute of the model, or put it into a list or dict that is one."
            )
        self._updated.update(id(replicas.native(variable)) for variable in variables)


def applies(optimizer: Any, variables: Iterable) -> None:
    """Tells the steps that are open now that an optimizer has gradients for these variables.

    Raises:
        InvalidArgument: If one of them does not know the optimizer.
    """
    variables = list(variables)
    for step in _OPEN.get():
        step._note(optimizer, variables)
