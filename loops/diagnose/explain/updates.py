"""How large an update of the weights is, beside the weights. Pure but for reading variables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loops.loop.state.variables import components

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
