"""What a call of many steps returns to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.loop.counters import Counters, CounterVariables
from loops.loop.outputs import Outputs
from loops.support.errors import BadOutputs

_COUNTS, _READING = 5, 7
"""How many numbers the counters have, and each scaler's `reading`."""


class CallResult(NamedTuple):
    """What a call did.

    Attributes:
        steps: Number of steps that the call took.
        outputs: For each output of the step an array [steps, ...].
        counters: The counts after the call.
        contradiction: A sentence if what the step returned contradicts its loss scalers, else None.
        readings: For each loss scaler the argument of its `check`.
    """

    steps: int
    outputs: Outputs
    counters: Counters
    contradiction: str | None
    readings: list[tuple[scaler.LossScaler, list[float]]]


def status(steps: tf.Tensor | int, counters: CounterVariables, scalers: Iterable[scaler.LossScaler]) -> tf.Tensor:
    """Everything but the outputs, computed in the graph of the call: float64 [1 + 5 + 7 for each scaler]."""
    counts = tf.cast(counters.numbers(), tf.float64)
    return tf.concat([[tf.cast(steps, tf.float64)], counts, *map(scaler.authoring.reading, scalers)], axis=0)


def status_size(scalers: Sequence[scaler.LossScaler]) -> int:
    """The length of `status`."""
    return 1 + _COUNTS + _READING * len(scalers)


def call_result(
    status: np.ndarray, outputs: Outputs, counters: CounterVariables, scalers: Sequence[scaler.LossScaler]
) -> CallResult:
    """Reads `status` on the host.

    Args:
        status: The value of `status`.
        outputs: The outputs of the call, arrays [steps, ...].
        counters: The variables that were read into `status`.
        scalers: The scalers that were read into `status`, in this order.
    """
    counts, contradiction = counters.read_from(status[1 : 1 + _COUNTS].astype(int).tolist())
    readings = list(zip(scalers, status[1 + _COUNTS :].reshape(-1, _READING).tolist(), strict=False))
    return CallResult(int(status[0]), outputs, counts, contradiction, readings)


def joined(parts: Sequence[CallResult]) -> CallResult:
    """Calls that follow each other as one.

    Args:
        parts: At least one.

    Raises:
        BadOutputs: If an output has another shape in one than in another.
    """
    last = parts[-1]
    for name, value in last.outputs.items():
        shapes = [part.outputs[name].shape[1:] if name in part.outputs else None for part in parts]
        if others := [shape for shape in shapes if shape != value.shape[1:]]:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {others[0]} for one batch and {value.shape[1:]} for "
                "another: expected one shape for all. Reduce it first, such as with tf.reduce_mean."
            )
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in last.outputs}
    contradiction = next((part.contradiction for part in parts if part.contradiction), None)
    return CallResult(sum(part.steps for part in parts), outputs, last.counters, contradiction, last.readings)
