"""What the host learns of a call, in the one array that it reads of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.loop.counters import Counters, CounterVariables
from loops.loop.outputs import Outputs

_EACH = 5
"""Numbers of the counters, and of the reading of each scaler."""


class Taken(NamedTuple):
    """What a call did.

    Attributes:
        steps: How many it took.
        outputs: For each output of the step an array [steps, ...].
        counters: The counts after it.
        contradiction: What the step says of itself and its loss scalers do not, or None.
        readings: For each loss scaler what its `check` takes.
    """

    steps: int
    outputs: Outputs
    counters: Counters
    contradiction: str | None
    readings: list[tuple[scaler.LossScaler, list[float]]]


def numbers(steps: tf.Tensor | int, counters: CounterVariables, scalers: Iterable[scaler.LossScaler]) -> tf.Tensor:
    """All but the outputs, in the graph of the call: float64 [1 + 5 + 5 for each scaler]."""
    counts = tf.cast(counters.numbers(), tf.float64)
    return tf.concat([[tf.cast(steps, tf.float64)], counts, *(one.reading() for one in scalers)], axis=0)


def count_of_numbers(scalers: Sequence[scaler.LossScaler]) -> int:
    """How many numbers that makes."""
    return 1 + _EACH * (1 + len(scalers))


def taken(
    data: np.ndarray, outputs: Outputs, counters: CounterVariables, scalers: Sequence[scaler.LossScaler]
) -> Taken:
    """What the host makes of `numbers` and the outputs."""
    rows = data[1:].reshape(-1, _EACH)
    counts, contradiction = counters.read_from(rows[0])
    return Taken(int(data[0]), outputs, counts, contradiction, list(zip(scalers, rows[1:].tolist(), strict=False)))
