"""What is known of the graph that is being traced, what is kept apart from it, and what AutoGraph rewrites for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.ops import control_flow_util

_Function = TypeVar("_Function", bound=Callable)


def as_written(function: _Function) -> _Function:
    """Marks a function that a `tf.function` is to trace without rewriting it first.

    This package needs no AutoGraph, which would take seconds of a first step to rewrite it, and milliseconds for every
    call in it. TensorFlow's public `do_not_convert` would also keep it from users' functions that are called within.
    """
    return autograph_artifact(function)


def as_called(function: _Function) -> _Function:
    """A user's function, rewritten by AutoGraph as it would have been in the user's own `tf.function`."""
    if tf.executing_eagerly():
        return function
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


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


def at_each_call(look: Callable[[], Any], check: Callable[[Any], None], key: Hashable) -> None:
    """Calls `check(look())` now, and on the host before each later call of the functions that are being traced.

    What it raises, the call raises. It adds no operation to the graph. TensorFlow has no public name for it: where this
    one is missing, `check` is called now alone.

    What a function leaves behind at the end of its trace is its own doing, and is not checked.

    Args:
        look: A function of nothing, to a value that can be compared.
        check: A function of such a value.
        key: One check of equal keys is kept in a graph.
    """
    check(look())
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    with tf.init_scope():
        nothing = tf.constant(False)
    while graph is not None:
        # The bodies of loops and branches are graphs as well, and not called by themselves.
        if type(graph).__name__ == "FuncGraph" and hasattr(graph, "capture_call_time_value"):
            called = _called(graph, look, check, nothing)
            graph.capture_call_time_value(called, tf.TensorSpec([], tf.bool), key=key, default_value=nothing)
        graph = getattr(graph, "outer_graph", None)


def _called(graph: Any, look: Callable[[], Any], check: Callable[[Any], None], nothing: tf.Tensor) -> Callable:
    left = []

    def called() -> tf.Tensor:
        now = look()
        if now not in left:
            check(now)
        return nothing

    # TensorFlow has no public name for it; where this one is missing, the function's own doing is checked too.
    with contextlib.suppress(AttributeError, RuntimeError):
        graph._add_scope_exit_callback(lambda: left.append(look()))
    return called


def opaque(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, for numbers that must not depend on what is made of them.

    TensorFlow regroups products, on one replica otherwise than on another. It does not look through this operation.
    """
    return tf.ensure_shape(tensor, tensor.shape)


def apart(function: Callable, *tensors) -> Any:
    """`function(*tensors)`, which the graph around it does not inline.

    For a branch that few steps take: the operations of a branch not taken are visited too, one by one.
    """
    if tf.executing_eagerly() or in_xla():
        return function(*tensors)
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})(*tensors)
