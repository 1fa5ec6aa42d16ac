"""Resolves strategies, and steps each through recorded events, as a `scaler.LossScaler` would.

XLA compiles the loop over the steps, for one strategy at a time: about 50 ms to compile, then 20 to 100 ns per step.
All strategies in one loop would take ten times as long, since only a small body becomes a single piece of machine code.
The strategies of this package give the same bits in every mode. Any other strategy is tried first, and runs without
XLA, at about 50 us per step, if XLA cannot compile it or computes other bits.

How many gradients of a step would be above an edge at another loss scale: a power of two moves every value by whole
octaves. Counts by octave are therefore exact for any edge that is the largest value of an octave in the format of the
gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.record.trace.tensors import probes_for
from loops.replay.recording import LEAST, Recording
from loops.run.strategy_text import parse_strategy
from loops.support.errors import LoopError

_TRIED = 256
"""The number of steps for trying a user's strategy."""


def named_strategies(strategies: Any) -> list[tuple[str, scaler.Strategy]]:
    """Pairs of name and strategy, from texts for `halfstep train --strategy`, or objects.

    Raises:
        scaler.InvalidArgument: If one is neither, if there is none, or if one is given twice.
    """
    if isinstance(strategies, str) or not isinstance(strategies, Sequence):
        strategies = [strategies]
    if not strategies:
        raise scaler.InvalidArgument("replay(strategies=[]): expected at least one, such as 'dynamic'.")
    found: list[tuple[str, scaler.Strategy]] = []
    for one in strategies:
        if isinstance(one, str):
            found.append((one, parse_strategy(one)))
        else:
            scaler.strategies.require_strategy(one, "replay")
            found.append((scaler.strategies.in_words(one), one))
    names = [name for name, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise scaler.InvalidArgument(f"strategy {twice!r} is given twice: expected each once.")
    guarded = next((name for name, one in found if isinstance(one, scaler.SpikeGuard)), None)
    if guarded is not None:
        raise scaler.InvalidArgument(
            f"strategy {guarded!r}: a SpikeGuard does not move the scale: expected the strategy inside of it."
        )
    return found


class Tallies(NamedTuple):
    """Cumulative counts of the gradients of weights.

    Attributes:
        below: Int64 [steps, octaves + 1], the number of values below each octave, and the total at the end.
        scale: Int32 [steps], log2 of the scale at which they were counted.
        octaves: For each edge the octave above it.
    """

    below: np.ndarray
    scale: np.ndarray
    octaves: tuple[int, ...]

    def first(self, steps: int) -> Tallies:
        """The counts of the first `steps` steps."""
        return self._replace(below=self.below[:steps], scale=self.scale[:steps])

    def counted(self, below: tf.Tensor, scale: tf.Tensor, step: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
        """`Event.histogram` of a step at another loss scale, int64 [edges + 1].

        Args:
            below: The attribute `below` as a tensor.
            scale: The attribute `scale` as a tensor.
            step: Scalar int32, the index of the step from 0.
            loss_scale: Scalar float32, a power of two.
        """
        bits = tf.bitcast(loss_scale, tf.int32)
        moved = tf.bitwise.right_shift(bits, 23) - 127 - scale[step]
        counts = below[step]
        last = below.shape[1] - 1
        at = [counts[tf.clip_by_value(octave - LEAST - moved, 0, last - 1)] for octave in self.octaves]
        ends = [tf.zeros_like(at[0]), *at, counts[last]]
        return tf.stack([high - low for low, high in itertools.pairwise(ends)])


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
        return Facts(self.limit[:steps], self.of_loss[:steps], amax, self.tallies and self.tallies.first(steps))


class Scales(NamedTuple):
    """The scale of each step, float32 [steps], and the one after the last step."""

    used: np.ndarray
    final: float


def stepper(strategy: scaler.Strategy) -> Callable[[Facts], Scales]:
    """Gives the scales of a strategy on some steps, from its initial state.

    Recordings with as many steps share the compiled loop.
    """
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


def tallies_of(recording: Recording, edges: tuple[float, ...]) -> Tallies:
    """The counts of a trace, for a strategy that needs a histogram with these edges.

    Raises:
        LoopError: If a step has no histogram of the gradients of the weights, or an edge is within an octave.
    """
    octaves = tuple(_octave_above(recording.name, edge) for edge in edges)
    parts = np.log2(recording.scale)
    if (parts != np.round(parts)).any():
        raise LoopError(
            f"{recording.name}: it was recorded at loss scales that are not powers of two, so its counts by octave "
            "cannot be moved. Record it with a strategy whose scales are powers of two, such as dynamic."
        )
    if "micro-batches" in recording.run.lacks:
        raise LoopError(
            f"{recording.name}: the gradients of its micro-batches were counted before they were summed, so it lacks "
            "the histogram of a step's gradients. Record it with accumulate=1."
        )
    if "weights" in recording.run.lacks:
        raise LoopError(
            f"{recording.name}: it lacks the histograms of the gradients of some weights. Record it with "
            f"{probes_for(recording.run.parts)}, of all layers and with the kind weight_gradients."
        )
    return Tallies(recording.below, parts.astype(np.int32), octaves)


def _octave_above(name: str, edge: float) -> int:
    """The lowest octave whose values are all above the edge."""
    octave = math.floor(math.log2(edge))
    largest = 2.0 ** (octave + 1) * (1 - scaler.float_format("float16").epsilon / 2)
    if edge >= largest:
        return octave + 1
    raise LoopError(
        f"{name}: its histograms count by octave, so the number of values above {edge:g} is unknown. Choose an edge "
        f"that is the largest float16 number of its octave, such as {largest:g}."
    )
