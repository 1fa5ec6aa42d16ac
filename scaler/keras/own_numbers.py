"""Which numbers that a step returns are its own: computed from no metric of the model."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import calls_functions, is_eager
from scaler.mistakes.sources import Node, node_key, sources_of

_UNSEEN = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Python functions may read any variable."""


def own_numbers(logs: dict[str, Any], model: keras.Model) -> frozenset[str]:
    """The names of the numbers that no variable of the model's metrics is in, for certain.

    Values alone cannot tell: a loss of NaN equals the mean of an epoch that this loss has made NaN.

    Args:
        logs: What a step returned, while it is traced.
        model: The Keras model with the metrics. A metric without variables leaves everything uncertain.
    """
    metrics = [metric.variables for metric in model.metrics]
    if not all(metrics):
        return frozenset()
    handles = {handle for variables in metrics for variable in variables for handle in _handles(variable)}
    tensors = {name: value for name, value in logs.items() if tf.is_tensor(value) and not is_eager(value)}
    return frozenset(name for name, tensor in tensors.items() if not _may_come_from(handles, tensor))


def _may_come_from(handles: set[int], tensor: tf.Tensor) -> bool:
    waiting: list[Node] = [(tensor, ())]
    seen: set[tuple] = set()
    while waiting:
        node = waiting.pop()
        if node_key(node) in seen:
            continue
        seen.add(node_key(node))
        here, calls = node
        if is_eager(here):
            if id(here) in handles:
                return True
            continue
        operation = here.op
        if operation.type in _UNSEEN:
            return True
        if operation.type == "Placeholder" or calls_functions(operation):
            sources = list(sources_of(*node))
            if not sources and (here.dtype == tf.resource or calls_functions(operation)):
                return True
        else:
            sources = [(source, calls) for source in operation.inputs]
        waiting += sources
    return False


def _handles(variable: Any) -> list[int]:
    """The handles of a variable on all replicas."""
    own = replicas.native(variable)
    return [id(part.handle) for part in getattr(own, "values", (own,))]
