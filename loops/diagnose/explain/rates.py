"""A learning rate that is not finite, or has risen by its schedule."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from loops.backend.steps import schedule as made_with
from loops.diagnose.graph.models import optimizer_of

_RISEN = 10.0


def risen_rate(moment: Any) -> tuple[float, float] | None:
    """The learning rate before the steps that were taken again, and that of the step.

    Args:
        moment: A `Moment`, at its step.

    Returns:
        None where both are finite and the second is less than ten times the first, or nothing is known.
    """
    optimizer = optimizer_of(moment.train_step)
    schedule = None if optimizer is None else made_with(optimizer)
    if optimizer is None or schedule is None:
        return None
    now = before = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        count = int(keras.ops.convert_to_numpy(optimizer.iterations))
        earlier = max(count - (moment.step - 1 - moment.began_at), 0)
        before = float(schedule(tf.constant(earlier, tf.int64)))
    risen = not math.isfinite(now) or now >= _RISEN * before > 0.0
    return (before, now) if risen else None
