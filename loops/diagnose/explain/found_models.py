"""The models of a past step: those that it names, and those that are seen when it calls their layers.

Which Keras layers a step calls while it is traced, whether or not the step names their model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.graph.models import models_in_step, outermost
from loops.support.errors import LoopError


def called_in(attempts: Attempts) -> dict[int, keras.layers.Layer]:
    """The layers that a step on one device calls, by id, seen while it is traced."""
    recording = recording_scaler_calls(attempts.scalers, moves=False)
    with attempts.as_it_was(), recording, recording_called() as called:
        tf.function(attempts.take_inlined).get_concrete_function(attempts.moment.batch)
    return called


def models_of(attempts: Attempts, called: Mapping[int, keras.layers.Layer]) -> list[keras.layers.Layer]:
    """The outermost models and layers that a step names or calls, those that it names first.

    Args:
        attempts: The attempts at the step.
        called: From `called_in`.

    Raises:
        LoopError: If there are none.
    """
    found = outermost([*models_in_step(attempts.moment.train_step), *called.values()])
    if not found:
        raise LoopError(
            "the train step names no Keras model, and no call of a Keras layer was seen in it: give the step its "
            "model as its attribute `model`, as in step.model = model."
        )
    return found


@contextlib.contextmanager
def recording_called() -> Iterator[dict[int, keras.layers.Layer]]:
    """Collects the layers that are called in this context, by their `id`; a layer stands before those that it calls."""
    called: dict[int, keras.layers.Layer] = {}
    original = keras.layers.Layer.__call__

    @functools.wraps(original)
    def recorded(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        called.setdefault(id(layer), layer)
        return original(layer, *args, **kwargs)

    keras.layers.Layer.__call__ = recorded
    try:
        yield called
    finally:
        keras.layers.Layer.__call__ = original
