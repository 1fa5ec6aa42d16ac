"""Steps a strategy through recorded events, as a `scaler.LossScaler` would.

XLA compiles the loop over the steps, for one strategy at a time: about 50 ms to compile, then 20 to 100 ns per step.
All strategies in one loop would take ten times as long, since only a small body becomes a single piece of machine code.
The strategies of this package give the same bits in every mode. Any other strategy is tried first, and runs without
XLA, at about 50 us per step, if XLA cannot compile it or computes other bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.replay.tallies import Tallies

_TRIED = 256
"""The number of steps for trying a user's strategy."""


class Facts(NamedTuple):
    """The data for each step's event.

    Attributes:
        limit: Float32 [steps]; at a scale above it, the step is skipped.
        of_loss: Bool [steps], whether it was skipped because its loss was not finite, as it is at any scale.
        amax: Float32 [steps], the largest gradients, or None if the strategy does not need them.
        tallies: Counts by magnitude, or None if the strategy does not need them.
    """

    limit: np.ndarray
    of_loss: np.ndarray
    amax: np.ndarray | None = None
    tallies: Tallies | None = None

    def first(self, steps: int) -> Facts:
        """The facts of the first `steps` steps."""
        amax = None if self.amax is None else self.amax[:steps]
        return Facts(
            self.limit[:steps], self.of_loss[:steps], amax, None if self.tallies is None else self.tallies.first(steps)
        )


class Scales(NamedTuple):
    """The scale of each step, float32 [steps], and the one after the last step."""

    used: np.ndarray
    final: float


def step_through(strategy: scaler.Strategy, facts: Facts) -> Scales:
    """The scales of a strategy on these steps, from its initial state."""
    return stepper(strategy)(facts)


def stepper(strategy: scaler.Strategy) -> Callable[[Facts], Scales]:
    """`step_through` for several recordings: those with as many steps share the compiled loop."""
    made: dict[tuple, Callable[..., Any]] = {}

    def step(facts: Facts) -> Scales:
        arrays = _arrays(facts)
        kind = (*(one.shape for one in arrays), None if facts.tallies is None else facts.tallies.octaves)
        if kind not in made:
            compiled = _ours(strategy) or _compiles(strategy, facts.first(_TRIED))
            made[kind] = _looped(strategy, facts, compiled=compiled)
        return _called(made[kind], facts)

    return step


def _ours(strategy: object) -> bool:
    """Whether a strategy and those inside of it are from this package, whose tests run them under XLA."""
    if isinstance(strategy, (tuple, list)):
        return all(map(_ours, strategy))
    if not dataclasses.is_dataclass(strategy):
        return not hasattr(strategy, "update")
    inner = [getattr(strategy, field.name) for field in dataclasses.fields(strategy) if field.init]
    return type(strategy).__module__.startswith("scaler.") and all(map(_ours, inner))


def _compiles(strategy: scaler.Strategy, facts: Facts) -> bool:
    try:
        compiled = _called(_looped(strategy, facts, compiled=True), facts)
    except (tf.errors.OpError, NotImplementedError):
        return False
    plain = _called(_looped(strategy, facts, compiled=False), facts)
    return compiled.final == plain.final and np.array_equal(compiled.used, plain.used)


def _looped(strategy: scaler.Strategy, facts: Facts, *, compiled: bool) -> Callable[..., Any]:
    # On a GPU, each of these scalar operations would take microseconds.
    with tf.device("CPU:0"):
        arrays = list(map(tf.constant, _arrays(facts)))
        loop = scaler.authoring.no_autograph(lambda *arrays: _loop(strategy, facts, *arrays))
        # A direct call of the function would warn of retracing for every strategy.
        return tf.function(loop, jit_compile=compiled).get_concrete_function(*arrays)


def _called(looped: Callable[..., Any], facts: Facts) -> Scales:
    with tf.device("CPU:0"):
        used, final = looped(*map(tf.constant, _arrays(facts)))
    return Scales(used.numpy(), float(final))


def _arrays(facts: Facts) -> list[np.ndarray]:
    amax = [facts.limit, facts.of_loss, *([] if facts.amax is None else [facts.amax])]
    return amax if facts.tallies is None else [*amax, facts.tallies.below, facts.tallies.scale]


def _loop(strategy: scaler.Strategy, facts: Facts, *arrays: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    limit, of_loss, *rest = arrays
    steps, amax = limit.shape[0], None if facts.amax is None else rest[0]

    def take(step: tf.Tensor, state: Any, used: tf.TensorArray) -> tuple:
        now = scaler.strategies.usable_state(strategy, state)
        finite = now.loss_scale <= limit[step]
        event = scaler.Event(
            finite,
            None if amax is None else tf.where(finite, amax[step], np.inf),
            None if facts.tallies is None else facts.tallies.counted(rest[-2], rest[-1], step, now.loss_scale),
        )
        after = scaler.strategies.after_step(strategy, now, event, of_loss[step])
        # As in a loss scaler, whose variables keep their shapes.
        kept = type(after)(*(tf.ensure_shape(new, old.shape) for new, old in zip(after, now, strict=True)))
        return step + 1, kept, used.write(step, now.loss_scale)

    start = (tf.constant(0), strategy.init(), tf.TensorArray(tf.float32, size=steps, element_shape=[]))
    _, state, used = tf.while_loop(lambda step, *_: step < steps, take, start)
    return used.stack(), scaler.strategies.usable_state(strategy, state).loss_scale
