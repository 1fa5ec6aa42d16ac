"""Finds what would have kept the weights from diverging: repeats the steps since the checkpoint with a change."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.steps import schedule as made_with
from loops.diagnose.explain.attempts import Attempts, loss_name
from loops.diagnose.explain.learning_rates import held, lower_rates, of_part, rate_of
from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.explain.worth import absurd_loss
from loops.diagnose.graph.changes import scheduled, slower, with_value
from loops.diagnose.graph.models import models_in_step, optimizers_of
from loops.step.train_step import TrainStep
from loops.support.text import amount

_RISEN = 10.0
_NORM = 1.0
_EPSILON = 1e-3


def risen_rate(moment: Any, part: str | None = None) -> tuple[float, float] | None:
    """The learning rate before the replayed steps, and that of the step, if it rose much.

    Args:
        moment: The run just before the step.
        part: The part of a `ComposedStep` that failed, or None.

    Returns:
        None if both are finite and the second is less than ten times the first, or if they are unknown.
    """
    optimizer = next(iter(optimizers_of(moment.train_step, part).values()), None)
    if optimizer is None:
        return None
    now = rate_of(optimizer)
    with moment.at_checkpoint():
        before = rate_of(optimizer)
    risen = not math.isfinite(now) or now >= _RISEN * before > 0.0
    return (before, now) if risen else None


def lost_weight(attempts: Attempts) -> tuple[str, int] | None:
    """The first weight that held a NaN or an infinity already where the replay began, and after how many steps."""
    moment = attempts.moment
    weights = [one for model in models_in_step(moment.train_step) for one in model.variables] + attempts.own_variables
    with moment.at_checkpoint():
        values = held(weights).values
    found = (one for one, value in zip(weights, values, strict=True) if not np.isfinite(value).all())
    return next(((getattr(one, "path", one.name), moment.began_at) for one in found), None)


def try_since_checkpoint(attempts: Attempts, losses: Sequence[float] = ()) -> list[Remedy]:
    """Replays the steps since the checkpoint with each remedy; empty if there are none.

    Args:
        attempts: The attempts at the step.
        losses: The losses of the earlier applied steps. A rate with which the loss is absurd beside them does not help.
    """
    moment = attempts.moment
    back = moment.step - 1 - moment.began_at
    if not back:
        return []
    # A `tf.function` of the user would go on with its first trace, and nothing would be changed.
    with with_value(moment, "take", attempts.take_inlined):
        return _tried(attempts, f"for the last {amount(back, 'step')}", losses)


def _tried(attempts: Attempts, since: str, losses: Sequence[float]) -> list[Remedy]:
    moment = attempts.moment
    remedies = []
    optimizers = optimizers_of(moment.train_step, attempts.part)
    whose, optimizer = next(((of_part(name), one) for name, one in optimizers.items()), ("", None))
    risen = risen_rate(moment, attempts.part)
    scheduled_rate = isinstance(made_with(optimizer), keras.optimizers.schedules.LearningRateSchedule)
    if optimizer is not None and risen is not None and math.isfinite(risen[0]) and scheduled_rate:
        name = f"the learning rate{whose} kept at {risen[0]:g} {since}"
        advice = f"Keep the learning rate{whose} near {risen[0]:g}."
        kept = keras.optimizers.schedules.ExponentialDecay(risen[0], 1, 1.0)
        remedies.append(_try(attempts, Kind.LEARNING_RATE, name, advice, scheduled, optimizer, kept))
    for name, one in optimizers.items():
        remedies += _try_rates(attempts, one, of_part(name), since, losses)
        if _helps(remedies[-1], losses):
            break
    decay = getattr(optimizer, "weight_decay", None)
    if decay:
        name, advice = f"no weight decay{whose} {since}", _decay_advice(float(decay))
        remedies.append(_try(attempts, Kind.WEIGHT_DECAY, name, advice, with_value, optimizer, "weight_decay", None))
    if isinstance(getattr(optimizer, "epsilon", None), float):
        name = f"epsilon={_EPSILON:g} in the optimizer{whose} {since}"
        advice = f"Create the optimizer with epsilon={_EPSILON:g}; in 16 bits a smaller one may be 0. Or use masters."
        remedies.append(_try(attempts, Kind.EPSILON, name, advice, with_value, optimizer, "epsilon", _EPSILON))
    if isinstance(moment.train_step, TrainStep) and moment.train_step.clip_norm is None:
        name, advice = f"clip_norm={_NORM:g} {since}", f"Clip the gradients, for example with clip_norm={_NORM:g}."
        remedies.append(_try(attempts, Kind.CLIP_NORM, name, advice, with_value, moment.train_step, "clip_norm", _NORM))
    if attempts.own_variables:
        remedies.append(_try_cleared(attempts, since))
    return remedies


def _try_rates(
    attempts: Attempts, optimizer: keras.optimizers.Optimizer, whose: str, since: str, losses: Sequence[float]
) -> list[Remedy]:
    """Tries lower learning rates, until one helps or cannot be tried; at least one."""
    remedies: list[Remedy] = []
    for rate in lower_rates(optimizer, whose):
        name = f"{rate.name} {since}"
        found = _try(attempts, Kind.LEARNING_RATE, name, rate.advice, slower, optimizer, rate.part)
        remedies.append(found)
        if not found.tried or _helps(found, losses) or not attempts.in_time():
            break
    return remedies


def _helps(remedy: Remedy, losses: Sequence[float]) -> bool:
    return remedy.finite and absurd_loss(remedy.loss, losses) is None


def _try(attempts: Attempts, kind: Kind, name: str, advice: str, context: Callable, *arguments: Any) -> Remedy:
    """Replays the steps inside of a context that changes something."""

    def changed(loop: Any) -> Callable:
        del loop
        with contextlib.ExitStack() as stack:
            stack.enter_context(context(*arguments))
            return stack.pop_all().close

    moment = attempts.moment
    step = moment.train_step
    # Replaying traces a `ComposedStep` anew in any case, so that each step has its own turns.
    again = step.retraced() if isinstance(step, TrainStep) else contextlib.nullcontext()
    try:
        with again:
            last = moment.from_checkpoint(changed)[-1]
    except (TypeError, ValueError, tf.errors.OpError, scaler.ScalerError):
        return Remedy(kind, name, False, False, math.nan, advice, since_checkpoint=True)
    name_of_loss = loss_name(attempts.part)
    loss = float(last.get(name_of_loss, math.nan))
    finite = math.isfinite(loss) or name_of_loss not in last
    applied = finite and bool(last.get("applied", "loss" in last))
    return Remedy(kind, name, True, applied, loss, advice, since_checkpoint=True)


def _decay_advice(decay: float) -> str:
    if decay < 0:
        return f"Change the sign of weight_decay={decay:g}: a negative one makes the weights grow."
    return f"Lower weight_decay={decay:g}: multiplied by the learning rate it must be well below 1."


def _try_cleared(attempts: Attempts, since: str) -> Remedy:
    moment, take, own = attempts.moment, attempts.moment.take, attempts.own_variables
    names = ", ".join(one.name.split(":")[0] for one in own[:3])

    def cleared(batch: Any) -> Any:
        for one in own:
            one.assign(tf.zeros_like(one))
        return take(batch)

    with with_value(moment, "take", cleared):
        return _try(
            attempts,
            Kind.OWN_VARIABLES_CLEARED,
            f"the step's own variables set to zero before each step {since}",
            f"Check how the step updates its own variables: {names}. Clear sums before each update.",
            contextlib.nullcontext,
        )
