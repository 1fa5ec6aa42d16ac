"""An overflow that costs time and no batch: gradients taken again at the scales that the strategy backs off to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import with_user_autograph
from scaler.backend.graphs import call_noninlined
from scaler.backend.variables import choose
from scaler.checks import SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.gate.measure import event_of
from scaler.gradients import Gradient
from scaler.gradients.lists import not_finite
from scaler.misuse.carried import Carried
from scaler.outcome.outcome import int64
from scaler.strategies import Event, Strategy
from scaler.strategies.base import float_bounds_of, needs_of, only_scale, usable_state

_MOST = 256
"""The most overflows of one step: as many halvings as float32 has powers of two."""
Again = Callable[[tf.Tensor], Sequence[Gradient]]


class Retry(NamedTuple):
    """What a step goes on with, after it has taken its gradients as often as it takes.

    Attributes:
        grads: Finite gradients if a retry helped, else as they were.
        loss_scale: What they are scaled by, scalar float32.
        state: The strategy's, after the overflows that were retried.
        retries: How many those were, scalar int64; 0 if all was finite, if no retry helps or if there is none to make.
    """

    grads: list
    loss_scale: tf.Tensor
    state: Any
    retries: tf.Tensor


def first_gradients(again: Again) -> list:
    """The gradients that a step begins with: those for an output gradient of 1.

    Raises:
        InvalidArgument: If `again` returns no list.
    """
    grads = with_user_autograph(again)(tf.constant(1.0))
    if not isinstance(grads, (list, tuple)):
        raise InvalidArgument(
            f"apply(again=...): it returned {type(grads).__name__}: expected a list with a gradient for each variable, "
            "such as lambda small: tape.gradient(scaled, weights, output_gradients=small)."
        )
    return list(grads)


def retry(
    strategy: Strategy, grads: Sequence, carried: Carried, again: Again, state: Any, when: bool | tf.Tensor = True
) -> Retry:
    """Takes gradients again if only their scaled backward pass overflowed. Every replica calls it.

    Where the loss is finite and a gradient is not, the strategy sees the overflow and backs off, and `again` takes the
    gradients at its new scale, until they are finite. If they are not at the strategy's floor either, or one that
    overflowed is flushed to zero there, no scale helps: everything is as it was, so that one bad batch does not cost
    the scale, and no weight is left out unnoticed.

    On several replicas each finds for itself how far it has to back off, and all take the lowest scale of any. What
    they would have to ask each other at each try, the sum of their gradients, is not looked at.

    Args:
        strategy: The strategy. One with a single scale has nothing to retry at.
        grads: Scaled gradients of this replica, or None.
        carried: What they are scaled by, and whether their loss was finite.
        again: From a scalar output gradient to the gradients for it; for 1 these are `grads`.
        state: The strategy's, as the step began.
        when: Scalar bool, whether the gradients will be used at all.

    Raises:
        InvalidArgument: On several replicas, for a strategy that needs statistics of all replicas' gradients.
    """
    if only_scale(strategy) is not None or when is False:
        return Retry(list(grads), carried.loss_scale, state, int64(0))
    several = replicas.replica_count() > 1
    if several and needs_of(strategy).of_each_replica:
        raise InvalidArgument(
            f"retry with {type(strategy).__name__} on {replicas.replica_count()} replicas: a replica that takes its "
            "gradients again does not know the statistics of the others, which this strategy needs. Use a strategy "
            "that looks at `finite` alone, such as hs.Dynamic(), or do without retry."
        )
    given = [place for place, grad in enumerate(grads) if grad is not None]
    here = [grads[place] for place in given]
    usable = carried.loss_finite if when is True else tf.logical_and(carried.loss_finite, when)
    step = _Step(strategy, carried, again, state, given, here)
    finite = _all_finite(here)
    nothing_to_retry = tf.logical_or(finite, tf.logical_not(usable))
    found, tries, loss_scale, state = tf.cond(nothing_to_retry, step.as_it_was, lambda: call_noninlined(step.tried))
    if several:
        usable = tf.logical_and(usable, tf.logical_or(finite, tries > 0))
        found, tries, loss_scale, state = step.agreed(found, tries, usable)
    taken = list(grads)
    for place, grad, like in zip(given, found, here, strict=True):
        taken[place] = _with_shape(grad, like)
    return Retry(taken, loss_scale, state, tries)


class _Step(NamedTuple):
    """The backward pass of a step on one replica, which may be repeated.

    Attributes:
        strategy: The strategy.
        carried: What the gradients are scaled by.
        again: Takes them again.
        state: The strategy's, as the step began.
        given: The places of the gradients that are not None.
        here: These gradients.
    """

    strategy: Strategy
    carried: Carried
    again: Again
    state: Any
    given: list[int]
    here: list

    def as_it_was(self) -> tuple[list, tf.Tensor, tf.Tensor, Any]:
        """The gradients, no retries, their scale and the strategy's state."""
        parts = list(map(_without_shape, self.here))
        return parts, int64(0), tf.identity(self.carried.loss_scale), self.state

    def tried(self) -> tuple[list, tf.Tensor, tf.Tensor, Any]:
        """The same after retries; as it was if none helps."""
        # A smaller output gradient would be flushed to zero.
        floor = tf.maximum(float_bounds_of(self.strategy)[0], self.carried.loss_scale * SMALLEST_SCALE)

        def goes_on(tries: tf.Tensor, state: Any, loss_scale: tf.Tensor, finite: tf.Tensor, grads: list) -> tf.Tensor:
            lower = tf.logical_or(tf.equal(tries, 0), loss_scale > floor)
            return tf.reduce_all([tf.logical_not(finite), lower, tries < _MOST])

        def back_off(tries: tf.Tensor, state: Any, loss_scale: tf.Tensor, finite: tf.Tensor, grads: list) -> tuple:
            whole = list(map(_with_shape, grads, self.here))
            state = _after_overflow(self.strategy, state, whole, loss_scale)
            loss_scale = tf.maximum(state.loss_scale, floor)
            grads = self.taken(loss_scale)
            return tries + 1, state, loss_scale, _all_finite(grads), list(map(_without_shape, grads))

        parts, no, loss_scale, state = self.as_it_was()
        start = (no, state, loss_scale, tf.constant(False), parts)
        tries, state, loss_scale, finite, grads = tf.while_loop(goes_on, back_off, start)
        helped = tf.logical_and(finite, self.came_back(grads))
        return tf.cond(helped, lambda: (grads, tries, loss_scale, state), self.as_it_was)

    def came_back(self, parts: list) -> tf.Tensor:
        """Whether each gradient that overflowed has a value, among those that did, that is not zero now.

        A gradient of which all of them are zero has been flushed on its way, and the step would be applied without it.
        Single values tell nothing: where an infinity meets a zero, as that of a mask or of a pixel that is always
        black, the value was NaN and is zero in truth.
        """
        found = map(_with_shape, parts, self.here)
        pairs = [(gradients.values_of(a), gradients.values_of(b)) for a, b in zip(self.here, found, strict=True)]
        back = []
        for before, now in pairs:
            overflowed = tf.logical_not(tf.math.is_finite(before))
            some = tf.reduce_any(tf.logical_and(overflowed, tf.not_equal(now, 0)))
            back.append(tf.logical_or(some, tf.logical_not(tf.reduce_any(overflowed))))
        return tf.reduce_all(tf.stack(back))

    def agreed(self, found: list, tries: tf.Tensor, usable: tf.Tensor) -> tuple[list, tf.Tensor, tf.Tensor, Any]:
        """The same at the lowest scale of all replicas; as it was if a replica has no gradients to use there."""

        def agree(merged: Any, usable: tf.Tensor, tries: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return replicas.all_of(merged, usable), replicas.largest_of(merged, tries)

        helped, most = replicas.merge(agree, usable, tf.cast(tries, tf.float32))
        most = choose(helped, tf.cast(most, tf.int64), int64(0))

        def back_off(tries: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
            return tries + 1, _after_overflow(self.strategy, state, (), state.loss_scale)

        def at_the_lowest() -> tuple[list, tf.Tensor, tf.Tensor, Any]:
            _, state = tf.while_loop(lambda tries, state: tries < most, back_off, (int64(0), self.state))
            scale = state.loss_scale
            grads = tf.cond(tf.equal(tries, most), lambda: found, lambda: list(map(_without_shape, self.taken(scale))))
            return grads, most, scale, state

        lowest = tf.cond(tf.equal(most, 0), self.as_it_was, lambda: call_noninlined(at_the_lowest))
        # What came back at this replica's own scale may be flushed at that of another one.
        back = replicas.merge(replicas.all_of, self.came_back(lowest[0]))
        return tf.cond(back, lambda: lowest, self.as_it_was)

    def taken(self, loss_scale: tf.Tensor) -> list:
        """The gradients at another scale, of the same types as those of the step."""
        try:
            grads = list(with_user_autograph(self.again)(loss_scale / self.carried.loss_scale))
        except RuntimeError as error:
            if "non-persistent" not in str(error):
                raise
            raise InvalidArgument(
                "apply(again=...): its tape gives gradients only once. Make it with tf.GradientTape(persistent=True)."
            ) from error
        found = [grads[place] for place in self.given] if len(grads) > len(self.given) else grads
        if len(found) != len(self.here) or any(grad is None for grad in found):
            raise InvalidArgument(
                f"apply(again=...): it returned {len(grads)} gradients, {sum(grad is None for grad in grads)} of them "
                "None: expected a gradient wherever it returned one for 1, in the same order."
            )
        return found


def _after_overflow(strategy: Strategy, state: Any, grads: Sequence, loss_scale: tf.Tensor) -> Any:
    """The strategy's state after it has seen gradients that overflowed."""
    needs = needs_of(strategy)
    norm, loss = (tf.constant(float("inf")) if needed else None for needed in (needs.norm, needs.loss))
    # A guard that watches each gradient knows how many there are.
    limits = getattr(state, "tensor_limits", None)
    norms = None if limits is None else tf.fill(limits.shape, float("inf"))
    event = Event(tf.constant(False), norm=norm, loss=loss, norms=norms)
    if needs.of_each_replica:
        seen = [gradients.sum_duplicates(gradients.widened(list(grads)))] * 2

        def look(merged: Any, own: list, summed: list) -> Event:
            return event_of(merged, needs, tf.constant(False), own, summed, loss_scale, norm, loss, norms)

        event = replicas.merge(look, *seen)
    return usable_state(strategy, with_user_autograph(strategy.update)(state, event))


def _without_shape(grad: Gradient) -> Any:
    """What of a gradient may change: XLA has to know the shape of slices, which a loop or a branch would hide."""
    return (grad.values, grad.indices) if isinstance(grad, tf.IndexedSlices) else grad


def _with_shape(found: Any, like: Gradient) -> Gradient:
    """The gradient again, with the shape of `like`."""
    return tf.IndexedSlices(*found, like.dense_shape) if isinstance(like, tf.IndexedSlices) else found


def _all_finite(grads: Sequence[Gradient]) -> tf.Tensor:
    """Whether every value is finite, also where a sum of their squares would not be."""
    return tf.logical_not(tf.reduce_any(not_finite(list(map(gradients.values_of, grads)))))
