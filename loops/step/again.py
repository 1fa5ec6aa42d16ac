"""The gradients of a step once more, from its batch: what a look at a skipped step needs.

The forward pass is taken again in the branch of a skip. Gradients of the first one would need its activations, which
the graph would then keep in every step until it knows whether to skip: up to a third more memory.
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


def taken_again(differentiate: Differentiate, before: scaler.Snapshot, first: Differentiate) -> Differentiate | None:
    """`differentiate` with all that it moves put back; `first` where it cannot be, eagerly, and on several replicas.

    None where gradients can be taken but once: those of a `tf.py_function` are gone after that.

    What is no variable cannot be put back: a pass that prints, draws from an iterator or fills a table is not taken
    again. Seed generators are among what a snapshot holds, so that Dropout takes the same values away.

    Args:
        differentiate: From an output gradient to the gradients of the step, by a forward pass of its own.
        before: The non-trainable variables as they were before the step.
        first: From an output gradient to the gradients of the forward pass that the step took.
    """
    if tf.executing_eagerly():
        return first
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        here = tf.compat.v1.get_default_graph().get_operations()
        return None if any(op.type == _PYTHON for op in here) else first

    def again(small: tf.Tensor) -> list:
        grads = differentiate(small)
        before.restore()
        return grads

    known = {id(native(variable)) for variable in before.variables}
    concrete = scaler.tracing.nested(again).get_concrete_function(tf.TensorSpec([], tf.float32))
    if has_effects(concrete):
        return None if _PYTHON in kinds_of_operations(concrete) else first
    moved = [variable for variable, assigned in captured(concrete) if assigned]
    return concrete if all(id(variable) in known for variable in moved) else first
