"""Strategies written a second time, from their descriptions alone, in NumPy and for many words at once.

A word is a sequence of finite (True) and non-finite (False) steps. `words` has the shape [steps, words]; every
parameter is a scalar or has one value a word, and the interval may have one a step as well. The results are float32
scales and integer counters *after* each step, of the shape [steps, words].
"""

from typing import NamedTuple

import numpy as np


class Trace(NamedTuple):
    """What a strategy's state was after each step."""

    loss_scale: np.ndarray
    good_steps: np.ndarray
    budget: np.ndarray


def dynamic(
    words,
    *,
    initial_scale,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    min_scale=2.0**-14,
    max_scale=2.0**40,
    hysteresis=1,
    consecutive_hysteresis=False,
    bad=None,
):
    """The trace of Dynamic. Steps that are `bad`, of the shape of `words`, are bad data, and leave all as it was."""
    steps, count = words.shape
    scale = spread(initial_scale, count, np.float32).copy()
    growth, backoff = spread(growth_factor, count, np.float32), spread(backoff_factor, count, np.float32)
    low, high = spread(min_scale, count, np.float32), spread(max_scale, count, np.float32)
    full = spread(hysteresis, count, np.int64)
    consecutive = spread(consecutive_hysteresis, count, bool)
    intervals = np.broadcast_to(np.asarray(growth_interval, np.int64), (steps, count))
    good, budget = np.zeros(count, np.int64), full.copy()
    trace = Trace(*(np.empty((steps, count), kind) for kind in (np.float32, np.int64, np.int64)))

    for step, finite in enumerate(words):
        before = [scale.copy(), good.copy(), budget.copy()]
        good[finite] += 1
        good[~finite] = 0
        budget[~finite] = np.maximum(budget[~finite] - 1, 0)
        grows = finite & (good >= intervals[step])
        shrinks = ~finite & (budget == 0)
        with np.errstate(over="ignore", under="ignore"):
            scale[grows] = np.minimum(scale[grows] * growth[grows], high[grows])
            scale[shrinks] = np.maximum(scale[shrinks] * backoff[shrinks], low[shrinks])
        good[grows] = 0
        refilled = grows | (finite & consecutive)
        budget[refilled] = full[refilled]
        for record, value, old in zip(trace, (scale, good, budget), before, strict=True):
            if bad is not None:
                value[bad[step]] = old[bad[step]]
            record[step] = value
    return trace


def constant(words, loss_scale):
    """The scales of Static, and of NoScaling with a scale of 1."""
    return np.full(words.shape, loss_scale, np.float32)


def spread(value, count, kind):
    """`value` for each of `count` words."""
    return np.broadcast_to(np.asarray(value, kind), (count,))


def word(text):
    """A word of the shape [steps, 1] from a text such as "1101", where 1 is a finite step."""
    return np.array([[letter == "1"] for letter in text])


def bad(text, letters):
    """Which steps of a text are bad data, by their letters: of the shape [steps, 1]."""
    return np.array([[letter in letters] for letter in text])
