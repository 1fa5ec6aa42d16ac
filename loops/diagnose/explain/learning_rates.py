"""Which lower learning rates are tried: until one helps, or it is no longer large."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import keras

from loops.backend.steps import schedule as made_with

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
