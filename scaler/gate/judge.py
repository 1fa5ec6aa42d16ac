"""The second part of a step: whether it may move its variables, and if not, why. It looks at small tensors alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.variables import choose
from scaler.errors import InvalidArgument
from scaler.gate.measure import Measured
from scaler.gate.state import StoredState
from scaler.gate.targets import Targets
from scaler.gradients.clipping import Clipping, ScaleEach
from scaler.outcome.outcome import Cause, Outcome, Skip, presumed_cause
from scaler.strategies.base import Strategy
from scaler.strategies.spike_guard import Verdict as OfGuard
from scaler.strategies.spike_guard import guard_of


class Verdict(NamedTuple):
    """Whether a step may move its variables, scalar bools.

    Attributes:
        sound: Whether it may: gradients, learning rates and limits are sound, and it is no spike.
        rates: For each part, whether its learning rate and the gradients are sound; None if only the gradients count.
        limits: For each part, whether the limit of its clipping is valid; None if it is known to be.
        spike: Whether a guard calls it a spike; None without a guard.
        guard: What the guard says; None without one.
    """

    sound: tf.Tensor
    rates: Sequence[tf.Tensor | None]
    limits: Sequence[tf.Tensor | None]
    spike: tf.Tensor | None
    guard: Judged | None

    def reason(
        self,
        targets: Targets,
        squares: tf.Tensor,
        norm: tf.Tensor,
        loss_finite: tf.Tensor,
        when: tf.Tensor,
        broken: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Why the step is skipped, unless it is applied, float32 [6]: see `Skip.packed`.

        Without `broken` a gradient whose squared norm is infinite counts as non-finite, though its values may only be
        larger than 2^64.

        Args:
            targets: What it was to move.
            squares: The squared norm of each gradient, unscaled: float32 or float64 [n].
            norm: Float32, the global norm.
            loss_finite: Scalar bool.
            when: Scalar bool, whether there is a step at all.
            broken: Bool [n], which scaled gradients hold a value that is not finite; None in a step that selects.
        """
        # Float32 throughout, as a reason is stored: it holds each position and number exactly.
        positions, large = tf.constant(targets.positions, tf.float32), tf.logical_not(tf.math.is_finite(squares))
        overflowed = None if broken is None else tf.reduce_any(broken)
        # Where every value is finite, a squared norm need not be.
        bad = large if overflowed is None else choose(overflowed, broken, large)
        last, ones = tf.reduce_max(tf.where(bad, positions, -1.0)), tf.cast(bad, squares.dtype)
        some = last >= 0.0
        first = tf.gather(positions, tf.argmax(choose(some, ones, squares)))
        found = Skip(
            cause=presumed_cause(loss_finite, some if overflowed is None else overflowed),
            has_nan=tf.reduce_any(tf.math.is_nan(squares)),
            index=first,
            count=tf.reduce_sum(ones),
            nearest=last,
        ).packed()
        # The first part counts, so that it comes last here. Bad gradients come before all parts: a limit that is drawn
        # from bad data must not hide them.
        for place, both in reversed(list(enumerate(zip(self.rates, self.limits, strict=True)))):
            for index, holds in zip((-1, -2), both, strict=True):
                if holds is not None:
                    failed = tf.logical_and(tf.math.is_finite(norm), tf.logical_not(holds))
                    found = choose(failed, Skip(Cause.UPDATE, index=index - 2 * place).packed(), found)
        if self.guard is None or self.spike is None:
            return found
        return self.guard.reason(targets, found, tf.logical_and(self.spike, when), squares)


def judge(
    strategy: Any, targets: Targets, measured: Measured, spikes: Spikes, loss: tf.Tensor | None, duplicates: bool
) -> Verdict:
    """Judges a step, the same on all replicas. Called once for all of them.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        targets: What the step is to move.
        measured: Its gradients and norms.
        spikes: What the scaler's guard says, if there is one.
        loss: Float32, of all replicas; None if the guard does not look at it.
        duplicates: Whether the optimizer is given the duplicates of an index each by itself.
    """
    rates = [
        None
        if part.proven is None or part.proven == float("inf")
        else _on_all(strategy, functools.partial(_rate_is_sound, part.optimizer, part.proven), measured.squared_norm)
        for part in targets.parts
    ]
    asked = [rate for rate in rates if rate is not None]
    # A learning rate is looked at together with the norm: one check for both.
    finite = asked or [_on_all(strategy, tf.math.is_finite, measured.squared_norm)]
    if duplicates:
        finite.append(_on_all(strategy, _finite_one_by_one, measured.given, measured.divisor))
    limits = [None if part.clip is None else part.clip.valid() for part in targets.parts]
    limits = [None if limit is None or tf.get_static_value(limit) else limit for limit in limits]
    guard = spikes.judge(targets, measured, loss)
    sound = functools.reduce(tf.logical_and, [*finite, *(limit for limit in limits if limit is not None)])
    if guard is None:
        return Verdict(sound, rates, limits, None, None)
    spike = tf.logical_and(sound, guard.verdict.spike)
    return Verdict(tf.logical_and(sound, tf.logical_not(spike)), rates, limits, spike, guard)


def _on_all(strategy: Any, look: Callable[..., tf.Tensor], *values: Any) -> tf.Tensor:
    """Whether all replicas find what `look` looks for in their share of the values."""
    return replicas.all_of(strategy, replicas.map_replicas(strategy, look, *values))


def _rate_is_sound(optimizer: Any, largest: float, squared_norm: tf.Tensor) -> tf.Tensor:
    """Whether the gradients' squared norm is finite, and the learning rate is one that the proof is about."""
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    if getattr(optimizer, "weight_decay", None):
        # By a negative rate weights would not decay but grow, step by step without end.
        rate = choose(rate >= 0.0, rate, float("nan"))
    # One check for both: this overflows between one and two times the largest rate.
    return tf.math.is_finite(squared_norm + rate * (2.0**127 / largest))


def _finite_one_by_one(grads: Sequence, loss_scale: tf.Tensor) -> tf.Tensor:
    """Whether duplicates can be squared each by itself: large ones may cancel each other in their sum."""
    slices = [grad for grad in grads if isinstance(grad, tf.IndexedSlices)]
    return tf.math.is_finite(gradients.squared_norm(gradients.divide(slices, loss_scale)))


@dataclasses.dataclass(frozen=True)
class Judged:
    """What a guard says of one step.

    Attributes:
        verdict: Whether it is a spike.
        norm: Float32, the global norm that was judged.
        norms: Float32 [remembered variables], that of each gradient; None if none is watched.
        clip: How its gradients are limited, or None.
        clipped: Int64, how many of them are clipped to limits of their own; None if none ever is.
        positions: For each remembered variable its position among those of the step, -1 if it is none of them.
    """

    verdict: OfGuard
    norm: tf.Tensor
    norms: tf.Tensor | None
    clip: Clipping | None
    clipped: tf.Tensor | None
    positions: Sequence[int]

    def reason(self, targets: Targets, reason: tf.Tensor, spike: tf.Tensor, squares: tf.Tensor) -> tf.Tensor:
        """The reason for a skip, float32 [6], SPIKE where the step is one: the largest gradient by `squares` is why."""
        verdict = self.verdict
        largest = tf.gather(tf.constant(targets.positions, tf.int64), tf.argmax(squares))
        where = largest
        if verdict.tensor is not None:
            own = tf.gather(tf.constant(self.positions, tf.int64), tf.maximum(verdict.tensor, 0))
            where = choose(verdict.tensor < 0, largest, own)
        count = 0 if verdict.beyond is None else verdict.beyond
        return choose(spike, Skip(Cause.SPIKE, index=choose(verdict.of_norm, where, -1), count=count).packed(), reason)


class Spikes:
    """The guard of a scaler, with the variables that hold its state. Without a guard it says nothing.

    Args:
        strategy: The scaler's.
        stored: Its state.
    """

    def __init__(self, strategy: Strategy, stored: StoredState) -> None:
        self._guard, self._stored = guard_of(strategy), stored
        self._places: dict[tuple, int] = {}

    def __bool__(self) -> bool:
        """Whether there is a guard."""
        return self._guard is not None

    @property
    def by_tensor(self) -> str | None:
        """What happens to a step with one gradient beyond its own limit, as of `SpikeGuard`."""
        return self._guard.by_tensor if self._guard else None

    def bind(self, variables: Sequence) -> None:
        """Remembers the variables of the first step, if each gradient's norm is watched. Called once for all replicas.

        Args:
            variables: Those that the step may move, float32 or float64.

        Raises:
            InvalidArgument: If the step moves a variable that the first one did not, or some of several that nothing
                tells apart.
        """
        if not self.by_tensor:
            return
        keys = _keys(variables)
        if not self._places:
            self._stored.remember_tensors(len(keys))
            self._places = {key: place for place, key in enumerate(keys)}
        for name, *_ in (key for key in keys if key not in self._places):
            raise InvalidArgument(
                f"apply: SpikeGuard(by_tensor={self.by_tensor!r}) remembers the last norms of {len(self._places)} "
                f"variables, those of the first step, and {name!r} is none of them: expected the same variables at "
                "every step, or some of them. Make a new LossScaler for others."
            )
        alike = [key[:2] for key in self._places]
        for name, shape, _ in keys:
            if alike.count((name, shape)) != sum(key[:2] == (name, shape) for key in keys):
                raise InvalidArgument(
                    f"apply: SpikeGuard(by_tensor={self.by_tensor!r}) knows variables by name and shape, and this step "
                    f"has only some of those named {name!r} of shape {shape}: expected all of them, or a name for each."
                )

    def judge(self, targets: Targets, measured: Measured, loss: tf.Tensor | None) -> Judged | None:
        """What the guard says of a step; None without one. Called once for all replicas, after `bind`.

        Args:
            targets: What the step moves.
            measured: Its gradients and norms.
            loss: Float32, of all replicas; None if it is not watched.
        """
        guard = self._guard
        if guard is None:
            return None
        state, norm, clip = self._stored.now(), measured.norm, targets.parts[0].clip
        if not guard.by_tensor:
            return Judged(guard.verdict(state, norm, loss), norm, None, clip, None, ())
        known = _keys(targets.built_for)
        places = [self._places[known[position]] for position in targets.positions]
        where = dict(zip(places, targets.positions, strict=True))
        exact = _spread(tf.sqrt(measured.squares), places, len(self._places))
        norms = tf.cast(exact, tf.float32)
        clipped = None
        if guard.by_tensor == "clip":
            factors = _picked(guard.factors(state, exact), places)
            clipped = tf.math.count_nonzero(factors < 1.0)
            clip = ScaleEach(factors, clip)
            norm = tf.cast(tf.sqrt(tf.reduce_sum(clip.scaled(measured.squares))), tf.float32)
        verdict = guard.verdict(state, norm, loss, norms)
        return Judged(verdict, norm, norms, clip, clipped, [where.get(at, -1) for at in range(len(self._places))])

    def check_optimizers(self, count: int) -> None:
        """Refuses to limit the gradients of several optimizers."""
        if self.by_tensor == "clip" and count > 1:
            raise InvalidArgument(
                'apply_together with SpikeGuard(by_tensor="clip"): it limits the gradients of one optimizer, and here '
                f'are {count}. Expected by_tensor="skip" or None.'
            )

    def check_whole_step(self, update: bool) -> None:
        """Refuses an `apply` that is only a part of a step."""
        if self._guard and not update:
            raise InvalidArgument(
                "apply(update=False) with a SpikeGuard: the guard judges a whole step by its norm and its loss, and "
                "here several calls are one step. Expected one apply for all variables, or a strategy without the "
                "guard."
            )

    def limits(self) -> dict[str, tf.Tensor]:
        """What the next step's norm and loss may be, scalar float32, by the names "norm_limit" and "loss_limit"."""
        names = ["_".join((name, "limit")) for name in self._guard.watched] if self._guard else []
        return {name: self._stored.field(name) for name in names}

    def told(self, last_skip: Outcome) -> Outcome:
        """The outcome of the last skip, with the numbers of a spike."""
        if not self._guard:
            return last_skip
        spike = tf.equal(last_skip.cause, int(Cause.SPIKE))
        value, usual, limit = tf.unstack(choose(spike, self._stored.field("last_spike"), 0.0))
        return last_skip._replace(value=value, usual=usual, limit=limit)

    def too_many(self, consecutive_skips: int) -> str | None:
        """What is wrong if more steps in a row were spikes than may be, as the beginning of a sentence."""
        if not self._guard or not consecutive_skips:
            return None
        spikes = int(self._stored.field("spikes_in_a_row"))
        most = self._guard.most_in_a_row
        if spikes <= most:
            return None
        guard = self._guard
        limits = {"factor": guard.norm or guard.loss or guard.by_tensor, "largest_norm": guard.largest_norm is not None}
        larger = " or ".join([*(name for name, used in limits.items() if used), "share"])
        return (
            f"{spikes} steps in a row were skipped as spikes, and {most} are allowed. This is another level and no "
            f"spike: go back to an earlier checkpoint if the run has diverged, else use a larger {larger}"
        )


def _keys(variables: Sequence) -> list[tuple]:
    """What variables are known by: name, shape, and the how many-th of these it is."""
    keys: list[tuple] = []
    for variable in variables:
        alike = (getattr(variable, "path", variable.name), tuple(variable.shape))
        keys.append((*alike, sum(key[:2] == alike for key in keys)))
    return keys


def _spread(norms: tf.Tensor, places: Sequence[int], count: int) -> tf.Tensor:
    """Norms at their places among `count`, NaN elsewhere."""
    if list(places) == list(range(count)):
        return norms
    own = dict(zip(places, tf.unstack(norms, num=len(places)), strict=True))
    nothing = tf.constant(float("nan"), norms.dtype)
    return tf.stack([own.get(place, nothing) for place in range(count)])


def _picked(values: tf.Tensor, places: Sequence[int]) -> tf.Tensor:
    """The values at these places."""
    if list(places) == list(range(values.shape[0])):
        return values
    each = tf.unstack(values)
    return tf.stack([each[place] for place in places])
