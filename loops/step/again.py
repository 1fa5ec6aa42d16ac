"""Computes the gradients of a step a second time from its batch, at a lower scale: for a retry.

The branch that needs them repeats the forward pass. Differentiating the first pass again would need its activations,
which the graph would then keep in every step until the decision: up to a third more memory.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import scaler
from loops.backend.steps import has_effects, kinds_of_operations
from loops.backend.variables import native
from loops.step.scalers_in_graph import captured

Differentiate = Callable[[tf.Tensor], list]
_PYTHON = "EagerPyFunc"


def taken_again(
    differentiate: Differentiate, before: scaler.Snapshot, first: Differentiate | None
) -> Differentiate | None:
    """`differentiate` from the variables as they were before the step, which leaves them as they are now.

    `first` instead if not everything can be restored, eagerly, and on several replicas. A pass that prints, draws from
    an iterator or fills a table has effects that cannot be undone, so it is not repeated. None if gradients can be
    computed only once, as those of a `tf.py_function`. The snapshot includes seed generators, so that Dropout drops the
    same values.

    Args:
        differentiate: From an output gradient to the gradients of the step, with a new forward pass.
        before: The non-trainable variables as they were before the step.
        first: From an output gradient to the gradients of the step's own forward pass; None if they cannot be had.
    """
    if tf.executing_eagerly():
        return first
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return None if first is None else only_first(first)

    again = _around(differentiate, before)
    known = {id(native(variable)) for variable in before.variables}
    concrete = scaler.authoring.nested(again).get_concrete_function(tf.TensorSpec([], tf.float32))
    if has_effects(concrete):
        return None if _PYTHON in kinds_of_operations(concrete) else first
    moved = [variable for variable, assigned in captured(concrete) if assigned]
    return concrete if all(id(variable) in known for variable in moved) else first


def repeated(differentiate: Differentiate) -> Differentiate | None:
    """`differentiate` from all variables that it moves as they are now. Once called, it leaves them as they were then.

    Called just before a pass is taken, and traced here, so that what the pass moves is known by then: statistics,
    seeds, random generators, metrics, on several replicas those of this one. Nothing of the pass itself is needed, so
    that it may lie inside of a branch. None in eager mode, where nothing is traced, and for a pass with an effect that
    cannot be undone.

    Args:
        differentiate: From an output gradient to the gradients of the step, with a new forward pass.
    """
    if tf.executing_eagerly():
        return None
    concrete = scaler.authoring.nested(differentiate).get_concrete_function(tf.TensorSpec([], tf.float32))
    if has_effects(concrete):
        return None
    return _around(concrete, scaler.snapshot([variable for variable, assigned in captured(concrete) if assigned]))


def _around(differentiate: Differentiate, before: scaler.Snapshot) -> Differentiate:
    """`differentiate` from the variables as they were before, which leaves them as they are now."""

    @scaler.authoring.no_autograph
    def again(small: tf.Tensor) -> list:
        now = scaler.snapshot(before.variables)
        before.restore()
        grads = differentiate(small)
        now.restore()
        return list(grads)

    return again


def only_first(first: Differentiate) -> Differentiate | None:
    """`first`; None if its gradients can be computed only once, as those of a `tf.py_function`."""
    if tf.executing_eagerly():
        return first
    here = tf.compat.v1.get_default_graph().get_operations()
    return None if any(op.type == _PYTHON for op in here) else first
