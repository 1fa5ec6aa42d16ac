"""What speaks for weights that have grown too large where no remedy helps: the last update, and the learning rate."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.learning_rates import rate_of
from loops.diagnose.explain.updates import Held, held, largest, size_of_update
from loops.diagnose.graph.models import optimizers_of, weights_in_step

_LARGE = 100.0
"""Weights of networks seldom have such magnitudes."""


@dataclasses.dataclass(frozen=True)
class Growth:
    """The size of the last update before a step, or of the weights where that is unknown.

    Attributes:
        step: The step of the last update before; None where no step before was repeated.
        moved: The norm of that update over the norm of the weights before it; None where it is unknown.
        learning_rate: That of the update; where no step before was repeated, of the failed step. None without a Keras
            optimizer.
        largest: The largest magnitude among the weights before the failed step; None without weights.
    """

    step: int | None
    moved: float | None
    learning_rate: float | None
    largest: float | None


def growth_of(attempts: Attempts) -> Growth | None:
    """Measures the last update before a step.

    Args:
        attempts: The attempts at the step.

    Returns:
        None if the update was not larger than the weights; where it is unknown, if the weights are not large.
    """
    moment = attempts.moment
    found = _last_update(attempts)
    if found is not None:
        return found if found.moved is not None and found.moved > 1.0 else None
    now = held(weights_in_step(moment.train_step, attempts.part))
    size = largest(now)
    return None if size <= _LARGE else Growth(None, None, _rate(attempts), size)


def rate_alone(attempts: Attempts) -> Growth | None:
    """The learning rate of a step whose update was not finite; None without a Keras optimizer."""
    rate = _rate(attempts)
    return None if rate is None else Growth(None, None, rate, None)


def _last_update(attempts: Attempts) -> Growth | None:
    """The last update, measured by repeating the steps from it on; None if it lies before those that can be."""
    moment = attempts.moment
    applied = f"{attempts.part}/applied" if attempts.part else "applied"
    last = max((row["step"] for row in moment.rows if row["step"] < moment.step and row.get(applied)), default=0)
    if last <= moment.began_at:
        return None
    seen: list[tuple[Held, float | None]] = []

    def look(loop: Any) -> None:
        del loop
        seen.append((held(weights_in_step(moment.train_step, attempts.part)), _rate(attempts)))

    try:
        moment.from_checkpoint(look, moment.step - last)
    except (scaler.ScalerError, tf.errors.OpError):
        return None
    (before, rate), *_ = seen
    now = held(weights_in_step(moment.train_step, attempts.part))
    return Growth(last, size_of_update(before), rate, largest(now))


def _rate(attempts: Attempts) -> float | None:
    optimizers = optimizers_of(attempts.moment.train_step, attempts.part)
    return next((rate_of(one) for one in optimizers.values()), None)
