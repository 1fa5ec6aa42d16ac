"""Finds the literals in a layer's `call` that float16 cannot hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.graph.changes import in_policy
from loops.diagnose.graph.literals import Literal, lost_literals
from loops.diagnose.graph.scaler_calls import recording_scaler_calls
from loops.diagnose.graph.whereabouts import recording_layers


def literals_of(attempts: Attempts, layers: Mapping[str, keras.layers.Layer], path: str) -> tuple[Literal, ...]:
    """The literals of a layer, each once, found by tracing the step as it is and with its layers in float32.

    Args:
        attempts: The attempts at the step.
        layers: The layers of the model, by path.
        path: The path of the layer.
    """
    narrow = [layer for layer in layers.values() if layer.compute_dtype == "float16"]
    if not narrow:
        return ()
    try:
        graph, inside = _traced(attempts, layers, path, contextlib.nullcontext())
        twin, _ = _traced(attempts, layers, path, in_policy(narrow, "float32"))
    except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
        return ()  # Some layer may not run in another dtype.
    found = [one for one in lost_literals(graph, twin) if one.node in inside]
    return tuple({(one.before, one.after, one.chosen): one for one in found}.values())


def _traced(attempts: Attempts, layers: Mapping[str, keras.layers.Layer], path: str, change: Any) -> tuple:
    """The graph of a step, and the names of the operations that a layer created."""
    inside: set[str] = set()

    def observed(batch: Any) -> Any:
        with recording_scaler_calls(attempts.scalers, moves=False), recording_layers(layers) as places:
            outputs = attempts.take_inlined(batch)
        operations = tf.compat.v1.get_default_graph().get_operations()
        by_number = places.by_number(len(operations))
        inside.update(one.name for one, layer in zip(operations, by_number, strict=True) if layer == path)
        return outputs

    with attempts.as_it_was(), change:
        return tf.function(observed).get_concrete_function(attempts.moment.batch).graph, inside
