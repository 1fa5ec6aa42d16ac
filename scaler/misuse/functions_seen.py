"""Sees, in eager mode, each call of a function that scales losses of one scaler or takes their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from scaler.backend.graphs import before_each_call, outermost_function
from scaler.backend.replicas import replica_count


class FunctionsSeen:
    """What the functions traced so far do with a scaler.

    Args:
        called: Is called before each call of such a function, with its graph, and whether it scales losses, takes
            gradients and retries.
    """

    def __init__(self, called: Callable[[Any, bool, bool, bool], None]) -> None:
        self._called = called
        self._scale: weakref.WeakSet = weakref.WeakSet()
        self._take: weakref.WeakSet = weakref.WeakSet()
        self._retry: weakref.WeakSet = weakref.WeakSet()
        self.some_are_unseen = False
        """Whether a function may scale a loss of which `called` does not hear."""

    def scales(self) -> None:
        """Records that the function that is being traced scales a loss."""
        self._look_at(self._scale)

    def takes(self) -> None:
        """Records that it applies or unscales gradients, or ends the step."""
        self._look_at(self._take)

    def retries(self) -> None:
        """Records that it returns gradients that it has taken again."""
        self._look_at(self._retry)

    def _look_at(self, functions: weakref.WeakSet) -> None:
        graph = outermost_function()
        if replica_count() > 1 or graph is None or not before_each_call(self._look, ("functions seen", id(self))):
            self.some_are_unseen = True
        else:
            functions.add(graph)

    def _look(self, graph: Any) -> None:
        scales, takes, retries = (graph in functions for functions in (self._scale, self._take, self._retry))
        if tf.executing_eagerly():
            self._called(graph, scales, takes, retries)
            return
        # Another function calls this one, while it is traced.
        if scales:
            self.scales()
        if takes:
            self.takes()
        if retries:
            self.retries()
