"""What is known of the graph that is being traced, and what is kept apart from it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def in_xla() -> bool:
    """Whether this is traced inside of a function with `jit_compile=True`.

    TensorFlow has no public name for it.
    """
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def in_steps_of_fit() -> bool:
    """Whether this is traced inside of the loop that Keras's `fit` makes for `steps_per_execution > 1`."""
    names, graph = [], tf.compat.v1.get_default_graph()
    while graph is not None:
        names.append(getattr(graph, "name", ""))
        graph = getattr(graph, "outer_graph", None)
    loops = [name for name in names if name.startswith(("while_body", "multi_step_on_iterator"))]
    return any(second.startswith("multi_step") and first.startswith("while_body") for first, second in pairwise(loops))


def apart(function: Callable, *tensors) -> Any:
    """`function(*tensors)`, which the graph around it does not inline.

    For a branch that few steps take: the operations of a branch not taken are visited too, one by one. And for numbers
    that must not depend on what is around them: TensorFlow regroups products, on one replica otherwise than on another.
    """
    if tf.executing_eagerly() or in_xla():
        return function(*tensors)
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})(*tensors)
