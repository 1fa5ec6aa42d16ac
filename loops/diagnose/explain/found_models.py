"""The models of a past step: those that it names, and those that are seen when it calls their layers."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.graph.called import recording_called
from loops.diagnose.graph.models import models_in_step, outermost
from loops.diagnose.graph.scaler_calls import recording_scaler_calls
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
