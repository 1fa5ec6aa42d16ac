"""Explains a step that a `scaler.SpikeGuard` held back: which number was above its limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.own_words import said_by_scaler
from loops.record.columns import cause_name


def is_spike(cause: scaler.Cause, logged: Mapping) -> bool:
    """Whether a step is a spike in the replay or in the run's log.

    A replayed micro-batch is a step by itself, which need not be a spike.

    Args:
        cause: Of the replayed step.
        logged: The step's row in the log.
    """
    return cause is scaler.Cause.SPIKE or cause_name(logged.get("cause")) == scaler.Cause.SPIKE.name


def as_spike(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation of a spike, with its number and the limit.

    Args:
        known: What is known about the step so far.
        attempts: The attempts at the step.
        attempt: The attempt as the run takes it.
    """
    known = dataclasses.replace(known, verdict="spike", applied=False)
    if any(getattr(one.strategy, "by_tensor", None) for one in attempts.scalers):
        # No log has the limits of each gradient, nor the norm of those that were clipped to theirs.
        return dataclasses.replace(known, said=said_by_scaler(attempts, scaler.Cause.SPIKE))
    return dataclasses.replace(known, spike=_spike(attempts.moment.logged or {}) or _spike(attempt.outputs))


def _spike(outputs: Mapping) -> tuple[str, float, float] | None:
    """Which number of a step is above its limit, the number and the limit; None if the outputs do not tell."""
    for name, output in (("norm", "grad_norm"), ("loss", "loss")):
        value, limit = outputs.get(output), outputs.get(f"{name}_limit")
        if value is not None and limit is not None and float(value) > float(limit):
            return name, float(value), float(limit)
    return None
