"""Which functions AutoGraph rewrites.

autograph_artifact       keeps it from our functions     absent: it rewrites them, too: a slower first step
tf_convert               rewrites users' functions       absent: they are traced unchanged: an `if` on a tensor
control_status_ctx         inside ours                     raises TensorFlow's error; one warning
its `status`               the same in nested functions    absent: as above, in those alone
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from scaler.backend.versions import say_once

_Function = TypeVar("_Function", bound=Callable)


def no_autograph(function: _Function) -> _Function:
    """Marks a function that `tf.function` traces without rewriting it first.

    This package does not need AutoGraph, which would add seconds to a first step and milliseconds to every call.
    TensorFlow's public `do_not_convert` would also exclude the users' functions that are called inside.
    """
    try:
        from tensorflow.python.autograph.impl.api import autograph_artifact
    except ImportError:
        return function
    return autograph_artifact(function)


def with_user_autograph(function: _Function) -> _Function:
    """Lets AutoGraph rewrite a user's function as it would be in the user's own `tf.function`."""
    if tf.executing_eagerly():
        return function
    autograph: Any = getattr(getattr(tf, "__internal__", None), "autograph", None)
    try:
        return autograph.tf_convert(function, autograph.control_status_ctx())
    except AttributeError:
        say_once(
            "does not tell how to rewrite a function for a graph: functions passed to this package are traced "
            "unchanged, and a Python `if` or `while` on a tensor in them fails. Use tf.cond and tf.while_loop there."
        )
        return function


def nested(function: Callable, **options: Any) -> Any:
    """A `tf.function` inside of another. `with_user_autograph` rewrites in it what it would rewrite here.

    Args:
        function: Traced as it is written.
        options: As `tf.function` takes them, but for `autograph`.
    """

    @no_autograph
    def written(*args: Any) -> Any:
        return function(*args)

    autograph: Any = getattr(getattr(tf, "__internal__", None), "autograph", None)
    context = getattr(autograph, "control_status_ctx", lambda: None)()
    status = getattr(getattr(context, "status", None), "name", "DISABLED")
    return tf.function(written, autograph=status != "DISABLED", **options)
