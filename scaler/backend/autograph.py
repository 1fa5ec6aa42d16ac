"""What AutoGraph rewrites, and what it leaves alone.

autograph_artifact       keeps it from our functions     absent: it rewrites them too: a slower first step
tf_convert               has it rewrite users' functions absent: they are traced as they are: an `if` on a tensor
control_status_ctx         inside of ours                  raises TensorFlow's error; said once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from scaler.backend.versions import say_once

_Function = TypeVar("_Function", bound=Callable)


def as_written(function: _Function) -> _Function:
    """Marks a function that a `tf.function` is to trace without rewriting it first.

    This package needs no AutoGraph, which would take seconds of a first step to rewrite it, and milliseconds for every
    call in it. TensorFlow's public `do_not_convert` would also keep it from users' functions that are called within.
    """
    try:
        from tensorflow.python.autograph.impl.api import autograph_artifact
    except ImportError:
        return function
    return autograph_artifact(function)


def as_called(function: _Function) -> _Function:
    """A user's function, rewritten by AutoGraph as it would have been in the user's own `tf.function`."""
    if tf.executing_eagerly():
        return function
    autograph: Any = getattr(getattr(tf, "__internal__", None), "autograph", None)
    try:
        return autograph.tf_convert(function, autograph.control_status_ctx())
    except AttributeError:
        say_once(
            "does not tell how to rewrite a function for a graph: functions given to this package are traced as they "
            "are, so that a Python `if` or `while` on a tensor in them fails. Use tf.cond and tf.while_loop there."
        )
        return function
