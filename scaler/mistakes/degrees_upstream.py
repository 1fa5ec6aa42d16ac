"""Finds the degree of a tensor in the scale of one loss scaler by what the tensor is computed from in a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from scaler.backend.graphs import BRANCHES, LOOPS, calls_functions, is_eager
from scaler.mistakes.degrees import Degree, Special
from scaler.mistakes.degrees_of_operations import degree_of_result
from scaler.mistakes.marks import LOSS_SCALE, SCALED, UNSCALED, kind_of, owner_of_scale
from scaler.mistakes.sources import Node, node_key, sources_of

_LOOKED_AT = 2000
"""So many tensors: a loss is weighted by few operations, but the weights may come from a model."""
_LARGEST_READ = 4096
_SMALL, _HUGE, _LARGEST_HALF = 1e-4, 1e30, 65504.0


class DegreesUpstream:
    """The degrees of tensors. Each tensor is looked at once.

    Args:
        owner: The `Calls` of the loss scaler.
        may_be_scale: Whether a tensor that comes from no other, such as an argument, may depend on a scale.
    """

    def __init__(self, owner: object, may_be_scale: Callable[[tf.Tensor], bool]) -> None:
        self._owner, self._may_be_scale = owner, may_be_scale
        self._known: dict[tuple, Degree] = {}

    def of(self, node: Node) -> Degree:
        """The degree of a tensor. None for one that depends on too many others."""
        waiting: list[tuple[Node, list[Node]]] = [(node, [])]
        while waiting and len(self._known) < _LOOKED_AT:
            here, sources = waiting.pop()
            key = node_key(here)
            if sources:
                self._known[key] = degree_of_result(here[0].op, [self._known[node_key(one)] for one in sources])
            elif key not in self._known:
                # A loop comes back to a tensor whose degree is not known yet.
                self._known[key], sources = self._look_at(here)
                waiting += [(here, sources), *((one, []) for one in sources)] if sources else []
        return None if waiting else self._known[node_key(node)]

    def _look_at(self, node: Node) -> tuple[Degree, list[Node]]:
        """The degree of a tensor, if the tensor tells it; else None and the tensors that tell it."""
        tensor, calls = node
        kind = kind_of(tensor)
        if kind is not None:
            return self._of_mark(tensor, kind), []
        if is_eager(tensor):
            return self._of_origin(tensor), []
        op = tensor.op
        if op.type in LOOPS or tensor.dtype in (tf.variant, tf.resource):
            return None, []
        if op.type == "Const":
            return _of_constant(tensor), []
        if op.type == "Placeholder" or calls_functions(op):
            return self._of_argument_or_call(tensor, calls)
        if op.type == "IdentityN":
            return None, [(op.inputs[tensor.value_index], calls)]
        if not op.inputs or any(source.dtype == tf.resource for source in op.inputs):
            return self._of_origin(tensor), []
        return None, [(source, calls) for source in op.inputs]

    def _of_argument_or_call(self, tensor: tf.Tensor, calls: tuple) -> tuple[Degree, list[Node]]:
        sources = list(sources_of(tensor, calls))
        if tensor.op.type in BRANCHES and sources:
            return None, [(tensor.op.inputs[0], calls), *sources]
        if sources or calls or calls_functions(tensor.op):
            return None, sources if len(sources) == 1 else []
        return self._of_origin(tensor), []

    def _of_mark(self, tensor: tf.Tensor, kind: str) -> Degree:
        if kind == UNSCALED:
            return 0.0
        if is_eager(tensor):
            return None
        scales = (
            [tensor] if kind != SCALED else [one for one in tensor.op.inputs[0].op.inputs if kind_of(one) == LOSS_SCALE]
        )
        return 1.0 if any(owner_of_scale(one) is self._owner for one in scales) else None

    def _of_origin(self, tensor: tf.Tensor) -> Degree:
        return None if tensor.dtype.is_floating and self._may_be_scale(tensor) else 0.0


def _of_constant(tensor: tf.Tensor) -> Degree:
    if not tensor.dtype.is_floating:
        return 0.0
    elements = tensor.shape.num_elements()
    if elements is None or elements > _LARGEST_READ:
        return None
    sizes = np.abs(np.asarray(tf.get_static_value(tensor), np.float64))
    if not sizes.any():
        return Special.ZERO
    guards = (sizes <= _SMALL) | ~(sizes < _HUGE) | (sizes == _LARGEST_HALF)
    return Special.GUARD if guards.all() else 0.0
