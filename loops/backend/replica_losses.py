"""Losses that divide by the number of replicas by themselves, in a step that divides, too.

keras.src.losses.loss         asks for the number, to divide by it           absent: scaler.UnsupportedVersion when a
nn_impl_distribute              the same, for tf.nn                            step is called on several replicas
reduce_values                 adds up the losses of examples                 absent: the same
check_per_example_loss_rank   is called where the size of a batch is given   absent: the same
make_function_context         tells apart what a tf.function has traced      absent: the same
keras.src.layers.layer        calls a layer                                  absent: a layer that asks is refused

The functions stay in place of TensorFlow's and Keras's, and do something else only in a thread inside of `means`: the
replicas are traced in threads that wait for each other, so none of them could put anything back.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.versions import versions

_DIVIDE = ("keras.src.losses.loss", "tensorflow.python.ops.nn_impl_distribute")
_PACKAGES = ("tensorflow", "keras", "scaler", "loops")
_MEAN = (
    "On several replicas a loss is the mean over the examples of one replica, and the step divides it by the number "
    "of replicas"
)


class _Here(threading.local):
    open = False
    whole = False


_here = _Here()


@contextlib.contextmanager
def means() -> Iterator[None]:
    """Within it the losses of Keras and TensorFlow are means over one replica's examples, as those of functions are.

    Whatever else asks for the number of replicas is told the true one.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        yield
        return
    _prepare()
    before, _here.open = _here.open, True
    try:
        yield
    finally:
        _here.open = before


def as_loss(function: Callable) -> Callable:
    """A user's function that gives a loss, or that others compute one of, as `scaler.tracing.as_called` has it.

    Raises:
        scaler.InvalidArgument: When it is called on several replicas, if it divides by their number.
    """

    @scaler.tracing.as_written
    def loss(*arguments: Any) -> Any:
        before, _here.whole = _here.whole, isinstance(function, keras.losses.Loss)
        try:
            return scaler.tracing.as_called(function)(*arguments)
        finally:
            _here.whole = before

    return loss


@functools.cache
def _prepare() -> None:
    try:
        from keras.src.losses import loss as of_keras
        from tensorflow.python.eager.polymorphic_function import function_context as traces
        from tensorflow.python.ops.nn_impl_distribute import losses_util as of_tensorflow

        reduce, check = of_keras.reduce_values, of_tensorflow.check_per_example_loss_rank
        key = traces.make_function_context
    except (ImportError, AttributeError) as error:
        raise scaler.UnsupportedVersion(
            f"{versions()} divides losses by the number of replicas in another place than the tested versions. Install "
            "a version that this package names in its metadata."
        ) from error

    @functools.wraps(reduce)
    def reduced(values: tf.Tensor, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> tf.Tensor:
        loss = reduce(values, sample_weight, reduction)
        if not _here.open or reduction != "sum" or not values.shape.rank:
            return loss
        if not _here.whole:
            raise scaler.InvalidArgument(
                f"a loss function calls a Keras loss with reduction='sum'. {_MEAN}: pass this Keras loss itself as the "
                "loss, or write reduction='sum_over_batch_size'."
            )
        return loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)

    @functools.wraps(check)
    def checked(losses: tf.Tensor) -> Any:
        if _here.open and sys._getframe(1).f_locals.get("global_batch_size") is not None:
            raise scaler.InvalidArgument(
                f"a loss function gives tf.nn.compute_average_loss a global_batch_size. {_MEAN}: leave it out, write "
                "tf.nn.compute_average_loss(losses)."
            )
        return check(losses)

    @functools.wraps(key)
    def keyed(scope_type: Any = None) -> Any:
        # A `tf.function` in the loss may have been traced elsewhere, with the division.
        return key((scope_type, "means") if _here.open else scope_type)

    owner: Any = next(kind for kind in tf.distribute.Strategy.__mro__ if "num_replicas_in_sync" in vars(kind))
    count = owner.num_replicas_in_sync

    def answered(strategy: tf.distribute.Strategy) -> int:
        return _answer(count.fget(strategy), sys._getframe(1)) if _here.open else count.fget(strategy)

    of_keras.reduce_values, of_tensorflow.check_per_example_loss_rank = reduced, checked
    traces.make_function_context = keyed
    owner.num_replicas_in_sync = property(answered, doc=count.__doc__)


def _answer(count: int, frame: FrameType | None) -> int:
    """The number of replicas for who asks."""
    while frame and frame.f_code.co_name == "num_replicas_in_sync":
        frame = frame.f_back  # A replica's context asks its strategy.
    asks = _module(frame)
    if asks in _DIVIDE:
        return 1
    while frame and asks.partition(".")[0] not in _PACKAGES and _module(frame) != "keras.src.layers.layer":
        if frame.f_globals is globals():
            raise scaler.InvalidArgument(
                f"a loss function asks for num_replicas_in_sync. {_MEAN}: do not divide by it yourself. If the number "
                "serves another purpose, read it outside of the loss function."
            )
        frame = frame.f_back
    return count


def _module(frame: FrameType | None) -> str:
    return str(frame.f_globals.get("__name__")) if frame else ""
