"""Losses that divide by the number of replicas by themselves, in a step that divides, too.

keras.src.losses.loss         asks for the number, to divide by it      absent: scaler.UnsupportedVersion at the
nn_impl_distribute            the same, for tf.nn                         first step on several replicas
reduce_values                 adds up the losses of examples            absent: the same
losses_util                   is asked where tf.nn averages losses      absent: the same
check_per_example_loss_rank     over a size that it may be given
polymorphic_function          has what tells apart a tf.function's     absent: the same
make_function_context           traces
keras.src.layers.layer        calls a layer                             absent: a layer that asks is refused

What takes their places stays there, and does the same as before but in a thread inside of `means`. Replicas are traced
in threads that wait for each other, so that none of them could put anything back.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend import versions

_within = contextvars.ContextVar("within", default=False)


@contextlib.contextmanager
def means() -> Iterator[None]:
    """Within it the losses of Keras and TensorFlow are means over one replica's examples, as those of functions are.

    Whatever else asks for the number of replicas is told the true one.
    """
    before = _within.set(tf.distribute.get_strategy().num_replicas_in_sync > 1 and _prepare())
    try:
        yield
    finally:
        _within.reset(before)


def as_loss(function: Callable) -> Callable:
    """A user's function that gives a loss, or what losses are computed from, with AutoGraph as the user set it.

    Raises:
        scaler.InvalidArgument: When it is called on several replicas, if it divides by their number.
    """

    @scaler.authoring.no_autograph
    def call_loss(*arguments: Any) -> Any:
        return scaler.authoring.with_user_autograph(function)(*arguments)

    return call_loss


@functools.cache
def _prepare() -> bool:
    """Puts our functions in the places of those that divide by the number of replicas."""
    try:
        from keras.src.losses import loss as of_keras
        from tensorflow.python.eager.polymorphic_function import function_context as traces
        from tensorflow.python.ops.nn_impl_distribute import losses_util

        of_keras.reduce_values = functools.partial(_reduced, of_keras.reduce_values)
        traces.make_function_context = functools.partial(_keyed, traces.make_function_context)
        check = losses_util.check_per_example_loss_rank
        losses_util.check_per_example_loss_rank = functools.partial(_checked, check)
    except (ImportError, AttributeError) as error:
        what = "divides losses by the number of replicas elsewhere than the tested versions: use one of these."
        raise scaler.UnsupportedVersion(f"{versions()} {what}") from error
    strategy: Any = tf.distribute.Strategy
    strategy.num_replicas_in_sync = property(functools.partial(_asked, strategy.num_replicas_in_sync.fget))
    return True


def _asked(count: Callable[[tf.distribute.Strategy], int], strategy: tf.distribute.Strategy) -> int:
    """The number of replicas, for whoever asks: 1 for a loss of Keras or TensorFlow."""
    if not _within.get():
        return count(strategy)
    frame: Any = inspect.currentframe()
    frame = frame.f_back
    if frame.f_code.co_name == "num_replicas_in_sync":
        frame = frame.f_back  # The context of a replica asks its strategy.
    asks = str(frame.f_globals.get("__name__"))
    if asks in ("keras.src.losses.loss", "tensorflow.python.ops.nn_impl_distribute"):
        return 1
    if asks.partition(".")[0] not in ("tensorflow", "keras", "scaler", "loops") and _loss_around(frame):
        instead = "do not divide by it. If the number serves another purpose, read it outside of the loss function."
        raise _divided("asks for num_replicas_in_sync", instead)
    return count(strategy)


def _loss_around(frame: Any) -> Any:
    """The loss function that has called what runs in a frame; None if there is none, or a layer in between."""
    while frame and frame.f_globals.get("__name__") != "keras.src.layers.layer":
        if frame.f_globals is globals() and frame.f_code.co_name == "call_loss":
            return frame.f_locals["function"]
        frame = frame.f_back
    return None


def _reduced(reduce: Callable, values: tf.Tensor, sample_weight: Any, reduction: str | None) -> tf.Tensor:
    """Keras's reduction of a loss. A sum counts once for each replica, since the step divides by their number."""
    loss = reduce(values, sample_weight, reduction)
    if not _within.get() or reduction != "sum":
        return loss
    if not isinstance(_loss_around(inspect.currentframe()), keras.losses.Loss):
        instead = (
            "pass this Keras loss itself as the loss, or write reduction='sum_over_batch_size'. For a WeightedLoss "
            "write reduction=None, and tf.reduce_sum around it."
        )
        raise _divided("calls a Keras loss with reduction='sum'", instead)
    return loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)


def _checked(check: Callable, losses: tf.Tensor) -> Any:
    """Refuses the global batch size of a loss of `tf.nn`."""
    frame: Any = inspect.currentframe()
    if _within.get() and frame.f_back.f_locals.get("global_batch_size") is not None:
        what = "gives tf.nn.compute_average_loss a global_batch_size"
        raise _divided(what, "leave it out, write tf.nn.compute_average_loss(losses).")
    return check(losses)


def _keyed(key: Callable, scope_type: Any = None) -> Any:
    """The key of a trace, another one within `means`."""
    # A `tf.function` in the loss may have been traced elsewhere, with the division.
    return key((scope_type, "means") if _within.get() else scope_type)


def _divided(what: str, instead: str) -> scaler.InvalidArgument:
    """The error of a loss that divides by the number of replicas."""
    return scaler.InvalidArgument(
        f"a loss function {what}. On several replicas a loss is the mean over the examples of one replica, and the "
        f"step divides it by their number: {instead}"
    )
