"""A forward and backward pass that can be taken again: what a look at a skipped step needs.

It is a function of its own, which is traced once and called twice: in every step, and in the branch of a skip. A second
derivative of the first pass would need its activations, which the graph would then keep in every step until it knows
whether to skip: up to a third more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import scaler
from loops.decisions import captured

Pass = Callable[[tf.Tensor], Any]
"""From an output gradient, scalar float32, to any structure."""


def taken(one_pass: Pass) -> tuple[Any, Pass]:
    """What the pass returns for an output gradient of 1, and a way to take it again.

    Taken again it leaves every variable as it was just before. Seed generators are variables, so that Dropout takes the
    same values away if they were put back by then.

    To be called in a graph, on one replica.
    """
    left: list = []

    def traced(small: tf.Tensor) -> list:
        # Users return numbers and objects, too, which no function of a graph passes on as they are.
        left[:] = [one_pass(small)]
        return [leaf for leaf in tf.nest.flatten(left) if _passes(leaf)]

    concrete = scaler.tracing.nested(traced).get_concrete_function(tf.TensorSpec([], tf.float32))
    moved = [variable for variable, assigned in captured(concrete) if assigned]

    def call(small: tf.Tensor) -> Any:
        given = iter(concrete(small))
        filled = [next(given) if _passes(leaf) else leaf for leaf in tf.nest.flatten(left)]
        return tf.nest.pack_sequence_as(left, filled)[0]

    def again(small: tf.Tensor) -> Any:
        before = [tf.identity(variable) for variable in moved]
        result = call(small)
        for variable, value in zip(moved, before, strict=True):
            variable.assign(value)
        return result

    return call(tf.constant(1.0)), again


def _passes(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)
