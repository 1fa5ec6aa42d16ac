"""A strategy taken over recorded steps, one event after the other, as a `scaler.LossScaler` takes it.

XLA compiles the loop over the steps, one strategy at a time: some 20 to 100 nanoseconds a step, and a twentieth of a
second to compile. All strategies in one loop take ten times as long, since only a small body becomes one piece of
machine code. A strategy gives the same bits in every mode; one that this package does not bring is tried first, and
takes the plain way, of some 50 microseconds a step, where XLA cannot compile it or computes other bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.replay.tallies import Tallies

_TRIED = 256
"""Steps by which an unknown strategy is tried."""


class Facts(NamedTuple):
    """What decides each step's event.

    Attributes:
        limit: Float32 [steps], above which the step is skipped.
        amax: Float32 [steps], or None if the strategy does not need it.
        tallies: Counts by magnitude, or None if the strategy does not need them.
    """

    limit: np.ndarray
    amax: np.ndarray | None = None
    tallies: Tallies | None = None

    def first(self, steps: int) -> Facts:
        """The first of the steps."""
        amax = None if self.amax is None else self.amax[:steps]
        return Facts(self.limit[:steps], amax, None if self.tallies is None else self.tallies.first(steps))


class Scales(NamedTuple):
    """The scale of each step, float32 [steps], and the one after the last step."""

    used: np.ndarray
    final: float


def step_through(strategy: scaler.Strategy, facts: Facts) -> Scales:
    """The scales of a strategy that sees these steps from its first state on."""
    if not _ours(strategy) and not _compiles(strategy, facts.first(_TRIED)):
        return _looped(strategy, facts, compiled=False)
    return _looped(strategy, facts, compiled=True)


def _ours(strategy: object) -> bool:
    """Whether this package brings a strategy, and those inside of it, so that its tests ran it under XLA."""
    if isinstance(strategy, (tuple, list)):
        return all(map(_ours, strategy))
    if not dataclasses.is_dataclass(strategy):
        return not hasattr(strategy, "update")
    inner = [getattr(strategy, field.name) for field in dataclasses.fields(strategy) if field.init]
    return type(strategy).__module__.startswith("scaler.") and all(map(_ours, inner))


def _compiles(strategy: scaler.Strategy, facts: Facts) -> bool:
    try:
        compiled = _looped(strategy, facts, compiled=True)
    except (tf.errors.OpError, NotImplementedError):
        return False
    plain = _looped(strategy, facts, compiled=False)
    return compiled.final == plain.final and np.array_equal(compiled.used, plain.used)


def _looped(strategy: scaler.Strategy, facts: Facts, *, compiled: bool) -> Scales:
    # A GPU would take microseconds for each of these scalars.
    with tf.device("CPU:0"):
        arrays = [tf.constant(one) for one in (facts.limit, *_arrays(facts))]
        loop = scaler.tracing.as_written(lambda *arrays: _loop(strategy, facts, *arrays))
        looped = tf.function(loop, jit_compile=compiled)
        # Called by itself, TensorFlow would warn that it traces a new function for every strategy.
        used, final = looped.get_concrete_function(*arrays)(*arrays)
    return Scales(used.numpy(), float(final))


def _arrays(facts: Facts) -> list[np.ndarray]:
    amax = [] if facts.amax is None else [facts.amax]
    return amax if facts.tallies is None else [*amax, facts.tallies.below, facts.tallies.scale]


def _loop(strategy: scaler.Strategy, facts: Facts, limit: tf.Tensor, *rest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    steps, update = limit.shape[0], scaler.tracing.as_called(strategy.update)
    amax = None if facts.amax is None else rest[0]

    def take(step: tf.Tensor, state: Any, used: tf.TensorArray) -> tuple:
        now = scaler.strategies.usable_state(strategy, state)
        finite = now.loss_scale <= limit[step]
        event = scaler.Event(
            finite,
            None if amax is None else tf.where(finite, amax[step], np.inf),
            None if facts.tallies is None else facts.tallies.counted(rest[-2], rest[-1], step, now.loss_scale),
        )
        after = update(now, event)
        # A variable of a loss scaler keeps its shape, too.
        kept = type(after)(*(tf.ensure_shape(new, old.shape) for new, old in zip(after, now, strict=True)))
        return step + 1, kept, used.write(step, now.loss_scale)

    start = (tf.constant(0), strategy.init(), tf.TensorArray(tf.float32, size=steps, element_shape=[]))
    _, state, used = tf.while_loop(lambda step, *_: step < steps, take, start)
    return used.stack(), scaler.strategies.usable_state(strategy, state).loss_scale
