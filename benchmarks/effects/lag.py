"""How far a loss scale may lag behind the gradients: skips and lost octaves against the delay."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, curves, flat

_LAGS = (1, 3, 10, 30, 100, 300)
_MARGINS = (0, 1, 2, 3)
_LARGEST = 65504.0
_OVERFLOWS = 65520.0
_FIRST_SHARE = 0.1
"""The part of a run that is also analysed alone: gradients change most in it."""


class LaggingState(NamedTuple):
    """State of `Lagging`.

    Attributes:
        loss_scale: Float32.
        history: Float32 [lag], amax of the last steps, the oldest first; 0 before there were any.
    """

    loss_scale: tf.Tensor
    history: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Lagging:
    """The largest scale that would have been safe `lag` steps ago, less a margin of octaves.

    A step that overflows counts as one whose amax was twice what its scale allowed.

    Attributes:
        lag: Steps, at least 1.
        margin: Octaves.
        initial_scale: The scale until the first observation is old enough.
    """

    lag: int
    margin: int
    initial_scale: float = 2.0**10
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    needs: ClassVar[scaler.strategies.Needs] = scaler.strategies.Needs(amax=True)

    def init(self) -> LaggingState:
        """The state before the first step."""
        return LaggingState(tf.constant(self.initial_scale), tf.zeros([self.lag]))

    def update(self, state: LaggingState, event: scaler.Event) -> LaggingState:
        """The state after a step that was attempted with `state` and showed `event`."""
        seen = tf.where(event.finite, event.amax, 2.0 * _LARGEST / state.loss_scale)
        history = tf.concat([state.history[1:], seen[None]], axis=0)
        old = history[0]
        room = tf.math.log(_LARGEST / tf.where(old > 0, old, 1.0)) / np.log(2.0)
        scale = tf.clip_by_value(2.0 ** (tf.floor(room) - float(self.margin)), self.min_scale, self.max_scale)
        return LaggingState(tf.where(old > 0, scale, state.loss_scale), history)


def run(seeds: int, steps: int) -> Found:
    """Skips against the delay, from the amax of recorded runs, and live with a margin of one octave.

    Args:
        seeds: The number of networks.
        steps: The steps of each run; more than twice the longest delay.
    """
    lags = [lag for lag in _LAGS if lag < steps // 2]
    trace = networks.train([scaler.Static(2.0**6)], seeds=seeds, steps=steps).largest[:, 0].astype(np.float64)
    begun = max(1, int(_FIRST_SHARE * steps))
    start, skipped = (
        np.array([[_skipped(part, lag, margin) for lag in lags] for margin in _MARGINS])
        for part in (trace[:begun], trace[begun:])
    )
    late = trace[begun:]
    # Octaves between the scale of so many steps ago and the safe one, where that is higher.
    lost = [np.maximum(np.log2(_safe(late[lag:]) / _safe(late[:-lag])), 0).mean(axis=0) for lag in lags]
    live = networks.train([Lagging(lag, 1) for lag in lags], seeds=seeds, steps=steps)
    rates, accuracy = live.skipped.mean(axis=0), live.accuracy
    growth = skipped[1].mean(axis=1)
    near, far = (np.log2(late[lag:] / late[:-lag]).std(axis=0) for lag in (1, lags[-1]))
    means = skipped.mean(axis=2)
    margins = [f"margin {margin}" for margin in _MARGINS]
    return Found(
        words={"near": near, "far": far, "lags": lags[-1], "rate_near": growth[0], "rate_far": growth[-1]},
        rows=((f"{lag}", *skipped[:, j], lost[j], rates[j], accuracy[j]) for j, lag in enumerate(lags)),
        holds={
            "longest": growth[-1] <= 2 * growth[0] + 1e-9,
            "margin": np.diff(means, axis=0) <= 0,
            "octave": means[1, -1] < means[0, 0],
            "accuracy": np.ptp(accuracy.mean(axis=1)) <= 0.01,
        },
        lines=[curves(lags, dict(zip(margins, part, strict=True))) for part in (skipped, start)],
        measured=flat({f"skipped {lag}": skipped[:, j] for j, lag in enumerate(lags)}, margins)
        | flat({"live": rates}, lags),
    )


def _skipped(trace: np.ndarray, lag: int, margin: int) -> np.ndarray:
    """The share of steps [seeds] at which the scale of `lag` steps ago overflows; NaN where the trace is too short."""
    if len(trace) <= lag:
        return np.full(trace.shape[1], np.nan)
    return (_safe(trace[:-lag]) * 2.0**-margin * trace[lag:] >= _OVERFLOWS).mean(axis=0)


def _safe(largest: np.ndarray) -> np.ndarray:
    return 2.0 ** np.floor(np.log2(_LARGEST / largest))
