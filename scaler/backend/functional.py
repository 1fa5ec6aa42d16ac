"""How the layers of a functional or Sequential model are connected.

_inbound_nodes    the calls of an operation                  absent: `UnsupportedVersion` from unit_scaled, before
_keras_history    the call that a symbolic tensor is from      anything has changed
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from scaler.backend.versions import unsupported


class Call(NamedTuple):
    """One call of a layer, or of another operation, in a model.

    Attributes:
        operation: The layer.
        sources: Of each symbolic tensor that it is given, the place of the call that made it.
    """

    operation: Any
    sources: tuple[int, ...]


def calls_of(model: keras.Model) -> tuple[list[Call], list[int]]:
    """The calls of a model, each behind those that it depends on, and the places of those that make its outputs.

    Args:
        model: Functional or Sequential, and built.

    Raises:
        UnsupportedVersion: If Keras does not say how layers are connected.
    """
    places: dict[tuple[int, int], int] = {}
    calls: list[Call] = []
    waiting = [_made_by(tensor) for tensor in model.outputs]
    while waiting:
        operation, number = waiting[-1]
        before = [_made_by(tensor) for tensor in _node(operation, number).input_tensors]
        missing = [each for each in before if _key(each) not in places]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if _key((operation, number)) not in places:
            places[_key((operation, number))] = len(calls)
            calls.append(Call(operation, tuple(places[_key(each)] for each in before)))
    return calls, [places[_key(_made_by(tensor))] for tensor in model.outputs]


def _made_by(tensor: Any) -> tuple[Any, int]:
    history = getattr(tensor, "_keras_history", None)
    if history is None:
        raise unsupported("unit_scaled", "does not say which layer a symbolic tensor comes from.")
    return history.operation, history.node_index


def _node(operation: Any, number: int) -> Any:
    nodes = getattr(operation, "_inbound_nodes", None)
    if nodes is None:
        raise unsupported("unit_scaled", "does not say what a layer is called with.")
    return nodes[number]


def _key(call: tuple[Any, int]) -> tuple[int, int]:
    return id(call[0]), call[1]
