"""The variables of an optimizer in `fit`: their order, which of them a step updates, and masters beside them."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.assignments import assigned_apart_from
from scaler.backend.optimizers import built_for, have_it_go_through
from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient, add, overwrites
from scaler.weights.masters import MasterWeights

_OPEN: contextvars.ContextVar[tuple[ProtectedStep, ...]] = contextvars.ContextVar("protected_steps", default=())


class Order:
    """The variables that an optimizer is built for, each given as Keras's variable or as TensorFlow's inside it.

    Attributes:
        variables: In their order.
    """

    def __init__(self, variables: Sequence = ()):
        self.variables = list(variables)
        self._positions = {id(replicas.native(variable)): index for index, variable in enumerate(variables)}
        self._updated: set[int] = set()

    def in_order(self, grads: list, variables: Sequence) -> list[Gradient]:
        """A gradient or None for each variable that the optimizer is built for, from those of some variables."""
        if len(grads) != len(variables):
            raise InvalidArgument(
                f"apply: {len(grads)} gradients for {len(variables)} variables: expected one for each. Pass the list "
                "that tape.gradient was called with."
            )
        given: dict[int, Gradient] = {}
        for grad, variable in zip(grads, variables, strict=True):
            index = self._positions.get(id(replicas.native(variable)))
            if index is None:
                raise InvalidArgument(
                    f"apply: variable {variable.name!r} is not among those that the optimizer was built for. One "
                    "optimizer serves one list of variables: create a new optimizer, or compile the model again."
                )
            both = grad is not None and given.get(index) is not None
            if both and overwrites(variable):
                raise InvalidArgument(
                    f"apply: 2 new values for variable {variable.name!r}, whose gradient is its new value: expected "
                    "one. Pass the variable once."
                )
            given[index] = add(given.get(index), grad)
            if grad is not None:
                self._updated.add(index)
        return [given.get(index) for index in range(len(self.variables))]

    def updates(self, variable: Any) -> bool:
        """Whether any step traced so far had a gradient for the variable."""
        return self._positions.get(id(replicas.native(variable))) in self._updated


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
        """Where in each graph the optimizers work that this replica calls.

        Replicas take turns with their traces, so that the operations of one lie between those of another.
        """
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))
        return self._spans.setdefault(replica, weakref.WeakKeyDictionary())

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


class Followed(list):
    """An optimizer's list of variables, with masters among them. An iteration between two steps also updates the model.

    Keras's callback iterates over the list and swaps each variable with its average. It does not know the model's own
    16-bit variables. So masters and model are synchronised before the first swap, and the model is written after the
    last one.
    """

    def __init__(self, variables: list, masters: MasterWeights, strategy: tf.distribute.Strategy):
        super().__init__(variables)
        self._masters, self._strategy = masters, strategy

    def __iter__(self) -> Iterator:
        """Iterates as any list does. Between two steps it also makes model and masters agree, before and after."""
        if not tf.executing_eagerly() or self._masters.in_update:
            return super().__iter__()
        return self._around(super().__iter__())

    def _around(self, variables: Iterator) -> Iterator:
        with replicas.in_scope(self._strategy):
            self._masters.refresh(self[:])
            self._masters.write(self[:])
        yield from variables
        with replicas.in_scope(self._strategy):
            self._masters.write(self[:])


def follow(inner: Any, masters: MasterWeights, strategy: tf.distribute.Strategy) -> None:
    """Makes the model follow the masters of an optimizer, and of the optimizers inside a MultiOptimizer."""
    for each in (inner, *getattr(inner, "optimizers", ())):
        have_it_go_through(each, Followed(built_for(each) or [], masters, strategy))
