"""An overflow that costs time and no batch: gradients taken again at the scales that the strategy backs off to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import as_called
from scaler.backend.graphs import apart
from scaler.checks import SMALLEST_SCALE
from scaler.errors import InvalidArgument
from scaler.gate.events import event_of
from scaler.gradients import Gradient
from scaler.gradients.reduced import not_finite
from scaler.mistakes.carried import Carried
from scaler.strategies import Event, Strategy
from scaler.strategies.base import float_bounds_of, needs_of, only_scale, usable_state

MOST = 256
"""The most overflows of one step: as many halvings as float32 has powers of two."""
Again = Callable[[tf.Tensor], Sequence[Gradient]]


class Retry(NamedTuple):
    """What a step goes on with, after it has taken its gradients as often as it takes.

    Attributes:
        grads: Finite gradients if a retry helped, else as they were.
        loss_scale: What they are scaled by, scalar float32.
        state: The strategy's, after the overflows that were retried.
        retries: How many those were, scalar int32; 0 if all was finite, if no retry helps or if there is none to make.
    """

    grads: list
    loss_scale: tf.Tensor
    state: Any
    retries: tf.Tensor


def retry(strategy: Strategy, grads: Sequence, carried: Carried, again: Again, state: Any) -> Retry:
    """Takes gradients again if only their scaled backward pass overflowed. Every replica calls it.

    Where the loss is finite and a gradient is not, the strategy sees the overflow and backs off, and `again` takes the
    gradients at its new scale, until they are finite. If they are not at the strategy's floor either, no scale helps:
    everything is as it was, so that one bad batch does not cost the scale.

    On several replicas each finds for itself how far it has to back off, and all take the lowest scale of any. What
    they would have to ask each other at each try, the sum of their gradients, is not looked at.

    Args:
        strategy: The strategy. One with a single scale has nothing to retry at.
        grads: Scaled gradients of this replica, or None.
        carried: What they are scaled by, and whether their loss was finite.
        again: From a scalar output gradient to the gradients for it.
        state: The strategy's, as the step began.

    Raises:
        InvalidArgument: On several replicas, for a strategy that needs statistics of all replicas' gradients.
    """
    if only_scale(strategy) is not None:
        return Retry(list(grads), carried.loss_scale, state, tf.constant(0))
    several = replicas.replica_count() > 1
    if several and any(needs_of(strategy)):
        raise InvalidArgument(
            f"retry with {type(strategy).__name__} on {replicas.replica_count()} replicas: a replica that takes its "
            "gradients again does not know the statistics of the others, which this strategy needs. Use a strategy "
            "that looks at `finite` alone, such as scaler.Dynamic(), or do without retry."
        )
    tried = _try(strategy, grads, carried, again, state)
    return _together(strategy, tried, carried, again, state) if several else tried


def _try(strategy: Strategy, grads: Sequence, carried: Carried, again: Again, state: Any) -> Retry:
    """The retries of this replica."""
    given = [place for place, grad in enumerate(grads) if grad is not None]
    here = [grads[place] for place in given]
    # A smaller output gradient would be flushed to zero.
    floor = tf.maximum(float_bounds_of(strategy)[0], carried.loss_scale * SMALLEST_SCALE)

    def overflowed(tries: tf.Tensor, state: Any, loss_scale: tf.Tensor, finite: tf.Tensor, grads: list) -> tf.Tensor:
        lower = tf.logical_or(tf.equal(tries, 0), loss_scale > floor)
        return tf.reduce_all([tf.logical_not(finite), carried.loss_finite, lower, tries < MOST])

    def back_off(tries: tf.Tensor, state: Any, loss_scale: tf.Tensor, finite: tf.Tensor, grads: list) -> tuple:
        grads = list(map(_with_shape, grads, here))
        state = _after_overflow(strategy, state, grads, loss_scale)
        loss_scale = tf.maximum(state.loss_scale, floor)
        grads = _taken(again, loss_scale / carried.loss_scale, given, grads)
        return tries + 1, state, loss_scale, _all_finite(grads), list(map(_without_shape, grads))

    start = (tf.constant(0), state, tf.identity(carried.loss_scale), _all_finite(here), list(map(_without_shape, here)))
    tries, backed_off, loss_scale, finite, found = tf.while_loop(overflowed, back_off, start)
    here = list(map(_with_shape, found, here))
    helped = tf.logical_and(finite, tries > 0)
    taken = list(grads)
    for place, grad in zip(given, here, strict=True):
        taken[place] = grad
    return Retry(
        taken,
        tf.where(helped, loss_scale, carried.loss_scale),
        _chosen(helped, backed_off, state),
        tf.where(helped, tries, 0),
    )


def _together(strategy: Strategy, tried: Retry, carried: Carried, again: Again, state: Any) -> Retry:
    """The retries of all replicas, each of which has made its own."""
    finite = tf.logical_and(_all_finite([grad for grad in tried.grads if grad is not None]), carried.loss_finite)

    def agree(merged: Any, finite: tf.Tensor, tries: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return replicas.all_of(merged, finite), replicas.largest_of(merged, tries)

    helped, most = replicas.merge(agree, finite, tf.cast(tried.retries, tf.float32))
    most = tf.where(helped, tf.cast(most, tf.int32), 0)

    def back_off(tries: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        return tries + 1, _after_overflow(strategy, state, (), state.loss_scale)

    _, state = tf.while_loop(lambda tries, state: tries < most, back_off, (tf.constant(0), state))
    loss_scale = tf.where(most > 0, state.loss_scale, carried.loss_scale)
    given = [place for place, grad in enumerate(tried.grads) if grad is not None]
    here = [tried.grads[place] for place in given]

    def at_the_lowest() -> list:
        return list(map(_without_shape, _taken(again, loss_scale / carried.loss_scale, given, here)))

    found = tf.cond(tf.less(tried.retries, most), lambda: apart(at_the_lowest), lambda: list(map(_without_shape, here)))
    taken = list(tried.grads)
    for place, grad, like in zip(given, found, here, strict=True):
        taken[place] = _with_shape(grad, like)
    return Retry(taken, loss_scale, state, most)


def _after_overflow(strategy: Strategy, state: Any, grads: Sequence, loss_scale: tf.Tensor) -> Any:
    """The strategy's state after it has seen gradients that overflowed."""
    event = Event(tf.constant(False))
    if any(needs_of(strategy)):
        seen = [gradients.sum_duplicates(gradients.widened(list(grads)))] * 2

        def look(merged: Any, own: list, summed: list) -> Event:
            return event_of(merged, needs_of(strategy), tf.constant(False), own, summed, loss_scale)

        event = replicas.merge(look, *seen)
    return usable_state(strategy, as_called(strategy.update)(state, event))


def _taken(again: Again, small: tf.Tensor, given: list[int], like: Sequence[Gradient]) -> list:
    """The gradients for an output gradient of `small`, of the same types as those of the step."""
    grads = list(as_called(again)(small))
    found = [grads[place] for place in given] if len(grads) > len(given) else grads
    if len(found) != len(like) or any(grad is None for grad in found):
        raise InvalidArgument(
            f"apply(again=...): it returned {len(grads)} gradients, {sum(grad is None for grad in grads)} of them "
            "None: expected a gradient wherever `grads` has one, in the same order."
        )
    return found


def _without_shape(grad: Gradient) -> Any:
    """What of a gradient may change: XLA has to know the shape of slices, which a loop or a branch would hide."""
    return (grad.values, grad.indices) if isinstance(grad, tf.IndexedSlices) else grad


def _with_shape(found: Any, like: Gradient) -> Gradient:
    """The gradient again, with the shape of `like`."""
    return tf.IndexedSlices(*found, like.dense_shape) if isinstance(like, tf.IndexedSlices) else found


def _all_finite(grads: Sequence[Gradient]) -> tf.Tensor:
    """Whether every value is finite, also where a sum of their squares would not be."""
    return tf.logical_not(tf.reduce_any(not_finite(list(map(gradients.values_of, grads)))))


def _chosen(first: tf.Tensor, one: Any, other: Any) -> Any:
    """The state `one` where `first` is true, else `other`."""
    return type(other)(*(tf.where(first, a, b) for a, b in zip(one, other, strict=True)))
