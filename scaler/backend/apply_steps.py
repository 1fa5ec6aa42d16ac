"""Parts of a Keras optimizer's `apply` that this package replaces, because Keras has no option for them.

    _distributed_tf_update_step    UPDATE: moves the variables         absent: not compiled: slower, the same numbers
    _apply_weight_decay            DECAY: decays the weights           absent: as UPDATE
    _all_reduce_sum_gradients      SUM: sums over the replicas         absent: as UPDATE; several replicas are refused
    _backend_apply_gradients       WINDOW: adds up a window            absent: gradient_accumulation_steps is refused
    _overwrite_variables_directly_with_gradients
                                   GIVEN: assigns the variables        absent: as WINDOW
                                     whose gradient is their value
    _iterations                    the count of steps, which           absent: it is read for each variable: slower,
                                     `update_step` reads                 the same numbers

Keras may keep such a method and no longer call it. The step would then be lost, or use scaled gradients. So whoever
replaces a method calls `check_called_once` while the step is traced, before any of it runs.

Of an accumulation window the optimizer takes the mean, where Keras would sum by itself:

    _backend_apply_gradients            what is replaced, and
    _overwrite_variables_directly_...     must then be called    absent: gradient_accumulation_steps is refused
    _clip_gradients, _apply_weight_decay, _backend_update_step,
    _update_model_variables_moving_average,
    _overwrite_model_variables_with_average_value,
    _iterations, _trainable_variables   what it does             absent: as above
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.variables import overwrites, shadowed
from scaler.backend.versions import say_once, unsupported, versions
from scaler.errors import UnsupportedVersion

UPDATE, SUM, DECAY = "_distributed_tf_update_step", "_all_reduce_sum_gradients", "_apply_weight_decay"
WINDOW, GIVEN = "_backend_apply_gradients", "_overwrite_variables_directly_with_gradients"
_METHODS = (
    "_clip_gradients",
    "_apply_weight_decay",
    "_backend_update_step",
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
)
_VALUES = ("_iterations", "_trainable_variables")
_KERAS_COUNTS_ITSELF = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 10)
"""Whether Keras's `apply` counts the step. Before 3.10 the replaced method counted it."""


@contextlib.contextmanager
def taken_over(optimizer: Any, **methods: Callable) -> Iterator[Counter[str]]:
    """Replaces methods of an optimizer while the context is active, and counts the calls of each.

    Raises:
        UnsupportedVersion: If the optimizer's class lacks a method of one of these names.
    """
    require(optimizer, *methods)
    calls = Counter[str]()

    def counted(name: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    with shadowed(optimizer, **{name: counted(name, method) for name, method in methods.items()}):
        yield calls


def check_called_once(calls: Counter[str], name: str, times: int = 1) -> None:
    """Raises `UnsupportedVersion` unless each replica called a replaced method exactly once.

    Args:
        calls: The counts from `taken_over`.
        name: The name of the method.
        times: The number of replicas that call `apply`.
    """
    if calls[name] != times:
        changed = "The weights have moved: load them again." if tf.executing_eagerly() else "Nothing was changed."
        raise unsupported(
            "apply",
            f"called the optimizer's {name} {calls[name]} times, but the tested versions call it {times} times: the "
            f"step may be lost, or use gradients that are scaled or summed twice. {changed}",
        )


def require(optimizer: Any, *names: str) -> None:
    """Raises `UnsupportedVersion` if the optimizer's class lacks a method of one of these names."""
    gone = missing(optimizer, *names)
    if gone:
        raise UnsupportedVersion(
            f"apply: the optimizer {type(optimizer).__name__} of {versions()} has no {', '.join(gone)}, which this "
            "package must replace here. Install a version that this package names in its metadata."
        )


def missing(optimizer: Any, *names: str) -> list[str]:
    """The methods among these that the optimizer's class lacks."""
    return [name for name in names if not callable(getattr(type(optimizer), name, None))]


def can_be_compiled(optimizer: Any) -> bool:
    """Whether `apply` has the steps that a compiled update replaces. Warns once if not."""
    gone = missing(optimizer, UPDATE, SUM, DECAY)
    if gone:
        names = ", ".join(gone)
        say_once(f"have no {names}: updates of large variables are not compiled. Slower, with the same numbers.")
    return not gone


@contextlib.contextmanager
def read_once(optimizer: Any) -> Iterator[None]:
    """Has the optimizer, and twins that are made of it, take the count as it is now; for variables on one device."""
    if not _can_be_read_once(optimizer):
        yield
        return
    with shadowed(optimizer, _iterations=tf.convert_to_tensor(optimizer._iterations)):
        yield


@contextlib.contextmanager
def read_once_a_device(optimizer: Any) -> Iterator[None]:
    """Has each `update_step` take the count as it is at the first variable of the same device."""
    if not _can_be_read_once(optimizer):
        yield
        return
    counts: dict[tuple, tf.Tensor] = {}

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        # A tensor of one branch is not known in another.
        place = id(tf.compat.v1.get_default_graph()), replicas.native(variable).device
        if place not in counts:
            counts[place] = tf.convert_to_tensor(optimizer._iterations)
        with shadowed(optimizer, _iterations=counts[place]):
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)

    with taken_over(optimizer, update_step=update_step):
        yield


def _can_be_read_once(optimizer: Any) -> bool:
    """Whether this is a graph and one of Keras's own optimizers, none of which moves the count in `update_step`."""
    return (
        not tf.executing_eagerly()
        and isinstance(optimizer, keras.optimizers.Optimizer)
        and type(optimizer).__module__.startswith("keras.")
        and isinstance(vars(optimizer).get("_iterations"), keras.Variable)
        and "update_step" not in vars(optimizer)
    )


def take_windows_over(inner: Any) -> None:
    """Makes `inner.apply` take the mean of a whole window instead of summing micro-batches itself.

    Raises:
        UnsupportedVersion: If these versions lack the steps to replace. At the first `apply`, before anything moves, if
            they do not call them.
    """
    require(inner, WINDOW, GIVEN, *_METHODS)
    calls: Counter[str] = Counter()

    def window(grads: Sequence, variables: Sequence) -> None:
        calls[WINDOW] += 1
        _apply_window(inner, grads, variables)

    def checked_apply(grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        missing = [name for name in _VALUES if not hasattr(inner, name)]
        if missing:
            raise unsupported("apply", f"has no {', '.join(missing)}, which gradient_accumulation_steps needs here.")
        own = functools.partial(type(inner).apply, inner, grads, trainable_variables)
        if tf.executing_eagerly() and replicas.replica_count() == 1 and not calls:
            # Tracing moves nothing.
            tf.function(own, autograph=False).get_concrete_function()
            check()
        calls.clear()
        own()
        if not all(map(overwrites, trainable_variables or ())):
            check()

    def check() -> None:
        if calls[WINDOW] != 1:
            raise unsupported("apply", f"calls {WINDOW} {calls[WINDOW]} times a step: gradients would add up.")

    vars(inner).update({WINDOW: window, GIVEN: _overwrite, "apply": checked_apply})


def are_taken_over(inner: Any) -> bool:
    """Whether `take_windows_over` has changed this optimizer."""
    return WINDOW in vars(inner)


def _apply_window(inner: Any, grads: Sequence, variables: Sequence) -> None:
    """Keras's step for the mean of a whole window."""
    # Keras counts the last micro-batch itself.
    inner._iterations.assign_add(inner.gradient_accumulation_steps - 1)
    grads = inner._clip_gradients(grads)
    inner._apply_weight_decay(variables)
    inner._backend_update_step(grads, variables, inner.learning_rate)
    if inner.use_ema:
        inner._update_model_variables_moving_average(inner._trainable_variables)
        if inner.ema_overwrite_frequency:
            tf.cond(
                tf.equal((inner.iterations + 1) % inner.ema_overwrite_frequency, 0),
                lambda: inner._overwrite_model_variables_with_average_value(inner._trainable_variables),
                lambda: None,
            )
    if not _KERAS_COUNTS_ITSELF:
        inner._iterations.assign_add(1)


def _overwrite(grads: Sequence, variables: Sequence) -> tuple[list, list]:
    """Assigns the variables that take their gradients as values, and returns the others with theirs."""
    rest = []
    for grad, variable in zip(grads, variables, strict=True):
        if overwrites(variable):
            variable.assign(grad)
        else:
            rest.append((grad, variable))
    return [grad for grad, _ in rest], [variable for _, variable in rest]
