"""A step that waits for nothing: every new value is chosen by the decision, in the pass that computes it.

A branch waits until the host knows its predicate, which on a GPU means until the device is done. Here both outcomes are
computed and `where(finite, new, old)` is assigned. A skip is known by the norms that were measured anyway. What takes a
second look at gradients or weights is left out: see "Selecting and branching" in docs/concepts/skips.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.selected import assigned_where
from scaler.gate.optimizers import variables_of
from scaler.gate.rollback import chosen_state
from scaler.gate.targets import Targets
from scaler.outcome.outcome import Cause, Skip, not_skipped, presumed_cause, whole


def move_where(finite: tf.Tensor, targets: Targets, move: Callable[[], None]) -> None:
    """Moves all variables of a step where `finite`, scalar bool, is true, and keeps every bit of them elsewhere."""
    masters = targets.masters
    model = (*masters.model_variables, *masters.weights, *masters.variables) if masters else ()
    with assigned_where(finite, (*targets.known, *variables_of(targets.optimizer), *model)):
        move()


def restore_where(strategy: Any, state: Sequence[tuple], finite: tf.Tensor, when: tf.Tensor) -> None:
    """Puts variables back to their values before a skipped step, and what became non-finite in any case.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        state: Pairs of a variable and its value before the step.
        finite: Scalar bool, whether the step is applied.
        when: Scalar bool, whether there is a step at all.
    """
    kept = finite if tf.get_static_value(when) else tf.logical_or(finite, tf.logical_not(when))
    for variable, value in state:
        replicas.assign_each(strategy, variable, functools.partial(chosen_state, kept=kept), value)


def reason_by_norms(targets: Targets, squares: tf.Tensor, loss_finite: tf.Tensor, skipped: tf.Tensor) -> Skip:
    """Why a step is skipped, as far as the norms of its gradients tell, which takes no pass over anything.

    A gradient whose squared norm is infinite counts as non-finite, though its values may only be larger than 2^64. No
    weight is looked at.

    Args:
        targets: What the step was to move.
        squares: The squared norm of each gradient, unscaled: float32 or float64 [n].
        loss_finite: Scalar bool.
        skipped: Scalar bool, whether the step is skipped. If not, the reason is NONE.
    """
    bad = tf.logical_and(tf.logical_not(tf.math.is_finite(squares)), skipped)
    some, positions = tf.reduce_any(bad), tf.constant(targets.positions, tf.int64)
    first = tf.gather(positions, _first(tf.where(some, tf.cast(bad, squares.dtype), squares)))
    last = tf.gather(positions, len(targets.positions) - 1 - _first(tf.reverse(tf.cast(bad, tf.float32), [0])))
    sound = tf.math.is_finite(tf.cast(tf.sqrt(tf.reduce_sum(squares)), tf.float32))
    # Sound gradients are held back by the learning rate alone.
    cause = tf.where(sound, whole(Cause.UPDATE), presumed_cause(loss_finite, tf.logical_not(some)))
    return not_skipped()._replace(
        cause=tf.where(skipped, cause, int(Cause.NONE)),
        has_nan=tf.logical_and(tf.reduce_any(tf.math.is_nan(squares)), skipped),
        index=tf.where(tf.logical_and(skipped, tf.logical_not(sound)), first, -1),
        count=tf.math.count_nonzero(bad),
        nearest=tf.where(some, last, -1),
    )


def _first(values: tf.Tensor) -> tf.Tensor:
    return tf.argmax(values)
