"""Which lower learning rates are tried: until one helps, or it is no longer large.

How large an update of the weights is, beside the weights. Pure but for reading variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from loops.backend.steps import schedule as made_with
from loops.loop.state.variables import components

_FIRST = (0.1, 0.01, 0.001)
_FURTHER = 1e-3
_USUAL = 1e-3
"""A learning rate that is not larger is seldom too large."""


class LowerRate(NamedTuple):
    """A lower learning rate to try.

    Attributes:
        part: What the learning rate is multiplied by.
        name: The change as a short phrase.
        advice: What to change in the program, as a sentence.
    """

    part: float
    name: str
    advice: str


def rate_of(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate now: that of its schedule at the step to come, if it has one."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def lower_rates(optimizer: keras.optimizers.Optimizer, whose: str) -> Iterator[LowerRate]:
    """Ever lower rates, for a caller that stops at the first that helps.

    A rate may be wrong by any factor: after a thousandth each further one is a thousandth of the one before, until the
    rate is one of those in use.

    Args:
        optimizer: Before the step.
        whose: " of part 'critic'", or nothing for the only optimizer of a step.
    """
    rate = rate_of(optimizer)
    constant = not isinstance(made_with(optimizer), keras.optimizers.schedules.LearningRateSchedule)
    for part in _parts(rate):
        to = f", which is {rate * part:g}" if constant and math.isfinite(rate) else ""
        advice = f"Lower the learning rate{whose} to {part:g} of its value{to}."
        yield LowerRate(part, f"{part:g} of the learning rate{whose}", advice)


def _parts(rate: float) -> Iterator[float]:
    yield from _FIRST
    part = _FIRST[-1]
    while math.isfinite(rate) and rate * part > _USUAL:
        part *= _FURTHER
        yield part


def of_part(name: str) -> str:
    """How a part's own thing is told from that of another: nothing for a step without parts."""
    return f" of part {name!r}" if name else ""


FAR = 10.0
"""An update of so many times the norm of the weights leaves nothing of what they were."""


class Held(NamedTuple):
    """Variables and copies of their values, float64."""

    variables: list[tf.Variable]
    values: list[np.ndarray]


def held(variables: Iterable[Any]) -> Held:
    """Copies the values of variables; on several replicas those of the first.

    Args:
        variables: Of Keras or TensorFlow, floating-point.
    """
    own = [components(one)[0] for one in variables]
    return Held(own, [_value(one) for one in own])


def size_of_update(before: Held) -> float | None:
    """The norm of what has changed since, over the norm of the values then: infinity if it is not finite.

    Args:
        before: From `held`.

    Returns:
        None if the variables were all zero, or are none.
    """
    then = _norm(before.values)
    if not then > 0.0:
        return None
    now = _norm([_value(one) - old for one, old in zip(before.variables, before.values, strict=True)])
    return now / then if math.isfinite(now) else math.inf


def largest(before: Held) -> float:
    """The largest magnitude among the values, NaN if one is; 0 without values."""
    return float(np.max([np.max(np.abs(one)) for one in before.values if one.size], initial=0.0))


def _value(variable: tf.Variable) -> np.ndarray:
    return np.array(variable.numpy()).astype(np.float64)


def _norm(values: list[np.ndarray]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return math.sqrt(sum(float(np.sum(np.square(one))) for one in values))
