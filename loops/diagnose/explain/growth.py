"""What speaks for weights that have grown too large where no remedy helps: the last update, and the learning rate."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.explanation import Explanation, Growth
from loops.diagnose.explain.learning_rates import rate_of
from loops.diagnose.explain.updates import Held, held, largest, size_of_update
from loops.diagnose.graph.models import optimizers_of, weights_in_step

_LARGE = 100.0
"""Weights of networks seldom have such magnitudes."""


def with_growth(known: Explanation, attempts: Attempts) -> Explanation:
    """With what speaks for an update that was too large, if nothing helps and the data are not at fault.

    Args:
        known: What is known about the step, with its remedies.
        attempts: The attempts at the step.
    """
    told = known.where == "data" or known.empty or known.label or known.lost_weight
    if any(one.helps for one in known.remedies) or told:
        return known
    found = _rate_alone(attempts) if known.verdict == "update" else _growth_of(attempts)
    return dataclasses.replace(known, growth=found)


def _growth_of(attempts: Attempts) -> Growth | None:
    """The last update, if it was larger than the weights; where it is unknown the weights, if they are large."""
    moment = attempts.moment
    found = _last_update(attempts)
    if found is not None:
        return found if found.moved is not None and found.moved > 1.0 else None
    now = held(weights_in_step(moment.train_step, attempts.part))
    size = largest(now)
    return None if size <= _LARGE else Growth(None, None, _rate(attempts), size)


def _rate_alone(attempts: Attempts) -> Growth | None:
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
