"""A second backward pass at lower scales: to save a batch from an overflow, or to say what a skip came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import with_user_autograph
from scaler.backend.graphs import call_noninlined, traced_once
from scaler.backend.variables import choose
from scaler.checks import SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.gate.measure import event_of
from scaler.gradients import Gradient
from scaler.gradients.lists import not_finite
from scaler.misuse.carried import Carried
from scaler.outcome.outcome import Cause, Skip, int64
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


_LOW_SCALE = 2.0**-14
"""Where float16's backward pass can hardly overflow any more."""


def cause_from_second_pass(skip: Skip, loss_scale: tf.Tensor, scaling: Strategy, diagnose: Callable) -> Skip:
    """The reason of a skip, after a look at the gradients at lower scales where an overflow is presumed.

    To be called in the branch of a skip, on one replica, by what `replicas.merge` calls.

    Args:
        skip: The reason as the gate presumes it.
        loss_scale: Scalar float32, of the step.
        scaling: The scaler's strategy. The look goes down to its floor, if that is below 2^-14.
        diagnose: From an output gradient to the gradients for it.
    """

    def in_replica(small: tf.Tensor) -> list:
        return replicas.map_replicas(tf.distribute.get_strategy(), with_user_autograph(diagnose), small)

    presumed, broken, backward = _looked(skip, loss_scale, scaling, in_replica)
    return _corrected(skip, loss_scale, presumed, broken, backward)


def cause_from_second_pass_on_replicas(
    skip: Skip,
    loss_scale: tf.Tensor,
    scaling: Strategy,
    diagnose: Callable,
    correct: Callable[[tf.Tensor, tf.Tensor], None],
) -> Skip:
    """The same on several replicas: each takes the second pass by itself, after the decision that they share.

    `correct` is called once for all replicas with two scalar bools: whether the cause is BACKWARD, and whether a lower
    scale helps.
    """
    presumed, broken, backward = _looked(skip, loss_scale, scaling, diagnose)

    def agree(strategy: tf.distribute.Strategy, broken: tf.Tensor, backward: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        broken, backward = replicas.any_of(strategy, broken), replicas.any_of(strategy, backward)
        found = _corrected(skip, loss_scale, presumed, broken, backward)
        correct(backward, found.lower_helps)
        return found.cause, found.lower_helps

    cause, helps = replicas.merge(agree, broken, backward)
    return skip._replace(cause=cause, lower_helps=helps)


def _looked(
    skip: Skip, loss_scale: tf.Tensor, scaling: Strategy, diagnose: Callable
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Whether an overflow is presumed; whether gradients are not finite at a scale of 1; and then at any scale."""
    seen = traced_once(lambda small: _seen(with_user_autograph(diagnose)(small)))
    presumed = tf.equal(skip.cause, int(Cause.OVERFLOW))

    def look() -> tuple[tf.Tensor, tf.Tensor]:
        # 1 is far above what float16 flushes to zero, and 2^-14 far below what overflows in it.
        scales = tf.minimum(1.0, loss_scale), tf.minimum(float_bounds_of(scaling)[0], _LOW_SCALE)
        at_one, at_low = (seen(tf.maximum(s / loss_scale, SMALLEST_SCALE)) for s in scales)
        broken = tf.logical_not(at_one.all_finite)
        flushed = tf.logical_not(tf.reduce_any(tf.logical_and(tf.logical_not(at_one.finite), at_low.not_zero)))
        return broken, tf.logical_and(broken, tf.logical_or(tf.logical_not(at_low.all_finite), flushed))

    no = tf.constant(False)
    return presumed, *tf.cond(presumed, lambda: call_noninlined(look), lambda: (no, no))


class _Seen(NamedTuple):
    """What is kept of the gradients for one scale, so that those for another need not be there at the same time.

    Attributes:
        all_finite: Scalar bool.
        finite: Bool, one for each value.
        not_zero: Bool, one for each value.
    """

    all_finite: tf.Tensor
    finite: tf.Tensor
    not_zero: tf.Tensor


def _seen(grads: list) -> _Seen:
    values = gradients.joined(grads)
    finite = tf.concat([tf.math.is_finite(value) for value in values], 0)
    not_zero = tf.concat([tf.not_equal(value, tf.zeros([], value.dtype)) for value in values], 0)
    return _Seen(gradients.all_finite(grads), finite, not_zero)


def _corrected(skip: Skip, loss_scale: tf.Tensor, presumed: tf.Tensor, broken: tf.Tensor, backward: tf.Tensor) -> Skip:
    helps = tf.logical_and(tf.logical_and(presumed, loss_scale > 1.0), tf.logical_not(broken))
    return skip._replace(cause=choose(backward, int64(Cause.BACKWARD), skip.cause), lower_helps=helps)
