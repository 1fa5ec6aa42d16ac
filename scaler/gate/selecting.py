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
