"""The second part of a step: whether it may move its variables, and if not, why. It looks at small tensors alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.variables import choose
from scaler.gate.measure import Measured
from scaler.gate.spikes import Judged, Spikes
from scaler.gate.targets import Part, Targets
from scaler.outcome.outcome import Cause, Skip, presumed_cause


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

        Args:
            targets: What it was to move.
            squares: The squared norm of each gradient, unscaled: float32 or float64 [n].
            norm: Float32, the global norm.
            loss_finite: Scalar bool.
            when: Scalar bool, whether there is a step at all.
            broken: Bool [n], which scaled gradients hold a value that is not finite; None if nobody looked at them.
        """
        found = reason_of(targets, squares, loss_finite, broken)
        # The first part counts, so that it comes last here. Bad gradients come before all parts: a limit that is drawn
        # from bad data must not hide them.
        for place, both in reversed(list(enumerate(zip(self.rates, self.limits, strict=True)))):
            for index, holds in zip((-1, -2), both, strict=True):
                if holds is not None:
                    failed = tf.logical_and(tf.math.is_finite(norm), tf.logical_not(holds))
                    found = choose(failed, Skip(Cause.UPDATE, index=index - 2 * place).packed(), found)
        if self.guard is None or self.spike is None:
            return found
        return self.guard.refine_reason(targets, found, tf.logical_and(self.spike, when), squares)


def judge(
    strategy: Any, targets: Targets, measured: Measured, spikes: Spikes | None, loss: tf.Tensor | None, duplicates: bool
) -> Verdict:
    """Judges a step, the same on all replicas. Called once for all of them.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        targets: What the step is to move.
        measured: Its gradients and norms.
        spikes: A guard, or None.
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
    limits = [_limit_of(part) for part in targets.parts]
    guard = spikes.judge(targets, measured.squares, measured.norm, loss, targets.parts[0].clip) if spikes else None
    sound = _all_true([*finite, *(limit for limit in limits if limit is not None)])
    if guard is None:
        return Verdict(sound, rates, limits, None, None)
    spike = tf.logical_and(sound, guard.verdict.spike)
    return Verdict(tf.logical_and(sound, tf.logical_not(spike)), rates, limits, spike, guard)


def reason_of(
    targets: Targets, squares: tf.Tensor, loss_finite: tf.Tensor, broken: tf.Tensor | None = None
) -> tf.Tensor:
    """The reason that gradients give for a skip, float32 [6].

    Without `broken` a gradient whose squared norm is infinite counts as non-finite, though its values may only be
    larger than 2^64.

    Args:
        targets: What the step was to move.
        squares: The squared norm of each gradient, unscaled: float32 or float64 [n].
        loss_finite: Scalar bool.
        broken: Bool [n], which of the scaled gradients hold a value that is not finite; None in a step that selects.
    """
    # Float32 throughout, as a reason is stored: it holds each position and number exactly.
    positions, large = tf.constant(targets.positions, tf.float32), tf.logical_not(tf.math.is_finite(squares))
    overflowed = None if broken is None else tf.reduce_any(broken)
    # Where every value is finite, a squared norm need not be.
    bad = large if overflowed is None else choose(overflowed, broken, large)
    last, ones = tf.reduce_max(tf.where(bad, positions, -1.0)), tf.cast(bad, squares.dtype)
    some = last >= 0.0
    first = tf.gather(positions, tf.argmax(choose(some, ones, squares)))
    return Skip(
        cause=presumed_cause(loss_finite, tf.logical_not(some if overflowed is None else overflowed)),
        has_nan=tf.reduce_any(tf.math.is_nan(squares)),
        index=first,
        count=tf.reduce_sum(ones),
        nearest=last,
    ).packed()


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


def _limit_of(part: Part) -> tf.Tensor | None:
    limit = None if part.clip is None else part.clip.valid()
    return None if limit is None or tf.get_static_value(limit) else limit


def _all_true(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    found = flags[0]
    for flag in flags[1:]:
        found = tf.logical_and(found, flag)
    return found
