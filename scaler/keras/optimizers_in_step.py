"""What the optimizers of a step under `protect` tell it: that they run, and for which variables."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.assignments import assigned_apart_from
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
        self._spans: dict[int, weakref.WeakKeyDictionary[Any, list[tuple[int, int]]]] = {}
        self._assigned: set[int] | None = None

    def traced_as(self, graph: Any) -> None:
        """Tells in which graph the step was traced last."""
        self._assigned = assigned_apart_from(graph, self._spans_here)

    def assigns(self, variable: Any) -> bool:
        """Whether the step assigns a variable by itself, beside what its optimizers do; true if it was never traced."""
        return self._assigned is None or id(replicas.own_part(variable).handle) in self._assigned

    @property
    def _spans_here(self) -> weakref.WeakKeyDictionary[Any, list[tuple[int, int]]]:
        """Where in each graph the optimizers work that this replica calls."""
        return self._spans.setdefault(_replica(), weakref.WeakKeyDictionary())

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


@contextlib.contextmanager
def applies(optimizer: Any, variables: Iterable) -> Iterator[None]:
    """Tells the steps that are open now that an optimizer applies gradients to these variables while this is open.

    Raises:
        InvalidArgument: If one of them does not know the optimizer.
    """
    variables, steps = list(variables), _OPEN.get()
    for step in steps:
        step._note(optimizer, variables)
    if tf.executing_eagerly() or not steps:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    yield
    for step in steps:
        step._spans_here.setdefault(graph, []).append((first, len(graph.get_operations())))


def _replica() -> int:
    """Which replica is traced. They take turns, so that the operations of one lie between those of another."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))
