"""What else an explanation finds around a step: weights that grew, a spike, gradients of zero, literals in a `call`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts, Held, held, size_of_update
from loops.diagnose.explain.case import Case
from loops.diagnose.explain.explanation import Explanation, Growth
from loops.diagnose.graph.calls import recording_layers, recording_scaler_calls
from loops.diagnose.graph.changes import in_policy
from loops.diagnose.graph.literals import Literal, lost_literals
from loops.diagnose.graph.models import models_in_step, weights_in_step
from loops.record.steps import cause_name

_LARGE = 100.0
"""Weights of networks seldom have such magnitudes."""


def growth_of(known: Explanation, attempts: Attempts) -> Growth | None:
    """What speaks for an update that was too large, if nothing helps and the data are not at fault.

    It is the last update, if that was larger than the weights; where it is unknown the weights, if they are large.
    """
    told = known.where == "data" or known.empty or known.label or known.lost_weight
    if told or any(one.helps for one in known.remedies):
        return None
    rate = Case(attempts).rate
    if known.verdict == "update":
        return None if rate is None else Growth(None, None, rate, None)
    found = _last_update(attempts)
    if found is not None:
        return found if found.moved is not None and found.moved > 1.0 else None
    size = largest(held(weights_in_step(attempts.moment.train_step, attempts.part)))
    return None if size <= _LARGE else Growth(None, None, rate, size)


def _last_update(attempts: Attempts) -> Growth | None:
    """The last update, measured by repeating the steps from it on; None if it lies before those that can be."""
    moment = attempts.moment
    applied = f"{attempts.part}/applied" if attempts.part else "applied"
    last = max((row["step"] for row in moment.rows if row["step"] < moment.step and row.get(applied)), default=0)
    if last <= moment.began_at:
        return None
    weights = weights_in_step(moment.train_step, attempts.part)
    seen: list[tuple[Held, float | None]] = []
    try:
        moment.from_checkpoint(lambda loop: seen.append((held(weights), Case(attempts).rate)), moment.step - last)
    except (scaler.ScalerError, tf.errors.OpError):
        return None
    (before, rate), *_ = seen
    return Growth(last, size_of_update(before), rate, largest(held(weights)))


def largest(before: Held) -> float:
    """The largest magnitude among the values, NaN if one is; 0 without values."""
    return float(np.max([np.max(np.abs(value)) for _, value in before if value.size], initial=0.0))


def lost_weight(attempts: Attempts) -> tuple[str, int] | None:
    """The first weight that held a NaN or an infinity already where the replay began, and after how many steps."""
    moment = attempts.moment
    weights = [one for model in models_in_step(moment.train_step) for one in model.variables] + attempts.own_variables
    with moment.at_checkpoint():
        found = [one for one, (_, value) in zip(weights, held(weights), strict=True) if not np.isfinite(value).all()]
    return (getattr(found[0], "path", found[0].name), moment.began_at) if found else None


def is_spike(cause: scaler.Cause, logged: Mapping) -> bool:
    """Whether a step is a spike in the replay or in the run's log.

    A replayed micro-batch is a step by itself, which need not be a spike.

    Args:
        cause: Of the replayed step.
        logged: The step's row in the log.
    """
    return cause is scaler.Cause.SPIKE or cause_name(logged.get("cause")) == scaler.Cause.SPIKE.name


def as_spike(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation of a spike, with its number and the limit."""
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


_BEGINNING = "The step was skipped because "


def said_by_scaler(attempts: Attempts, cause: scaler.Cause) -> str | None:
    """Repeats the step with its update, and returns what its scaler says of it as a clause.

    Args:
        attempts: At the step.
        cause: Why it was skipped.

    Returns:
        Such as "in part 'critic', the learning rate of SGD is NaN ..."; None if no scaler tells.
    """
    if attempts.moment.alone:
        return None  # Other workers would have to take part.
    scalers = getattr(attempts.moment.train_step, "scalers", {})
    with attempts.as_it_was():
        attempts.moment.loop.calls.one(attempts.moment.batch)
        for one in attempts.scalers:
            skipped = int(one.counters.consecutive_skips) and int(one.last_skip.cause) == cause
            said = one.explain() if skipped else ""
            if said.startswith(_BEGINNING):
                own = [name for name, each in scalers.items() if each is one] if len(scalers) > 1 else []
                part = f"in part {own[0]!r}, " if len(own) == 1 else ""
                return part + said.removeprefix(_BEGINNING)
    return None


_OCTAVES = (8, 16, 24, 32, 40)
"""The scale is raised by so many, until the step is no longer finite."""
_MOST = 2.0**126
"""The largest loss scale that there is."""


def with_zero_gradients(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation of an applied step, with the verdict "zero" if its gradients are and its loss is not."""
    lost = attempt.outputs.get("grad_norm") == 0 and attempt.loss != 0 and math.isfinite(attempt.loss)
    if not lost:
        return known
    known = dataclasses.replace(known, verdict="zero", nonzero=_count(attempts.take_at(1.0)))
    if known.nonzero:
        return known
    for octaves in _OCTAVES:
        scale = (known.loss_scale or 1.0) * 2.0**octaves
        raised = attempts.take_at(2.0**octaves)
        if not raised.finite or scale > _MOST:
            break
        if _count(raised) > (known.nonzero or 0):
            known = dataclasses.replace(known, nonzero=_count(raised), nonzero_at=scale)
    return known


def _count(attempt: Attempt) -> int:
    return 0 if attempt.nonzero is None else int(attempt.nonzero.sum())


def literals_of(attempts: Attempts, path: str) -> tuple[Literal, ...]:
    """The literals of a layer, each once, found by tracing the step as it is and with its layers in float32."""
    narrow = [layer for layer in attempts.layers.values() if layer.compute_dtype == "float16"]
    if not narrow:
        return ()
    try:
        graph, inside = _traced(attempts, path, contextlib.nullcontext())
        twin, _ = _traced(attempts, path, in_policy(narrow, "float32"))
    except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
        return ()  # Some layer may not run in another dtype.
    found = [one for one in lost_literals(graph, twin) if one.node in inside]
    return tuple({(one.before, one.after, one.chosen): one for one in found}.values())


def _traced(attempts: Attempts, path: str, change: Any) -> tuple[tf.Graph, set[str]]:
    """The graph of a step, and the names of the operations that a layer created."""
    inside: set[str] = set()

    def observed(batch: Any) -> Any:
        with recording_scaler_calls(attempts.scalers, moves=False), recording_layers(attempts.layers) as places:
            outputs = attempts.take_inlined(batch)
        operations = tf.compat.v1.get_default_graph().get_operations()
        by_number = places.by_number(len(operations))
        inside.update(one.name for one, layer in zip(operations, by_number, strict=True) if layer == path)
        return outputs

    with attempts.as_it_was(), change:
        return tf.function(observed).get_concrete_function(attempts.moment.batch).graph, inside
