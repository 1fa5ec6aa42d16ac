"""Checks of numbers given to a constructor, and of names. Tensors and variables pass: their values are not known yet.

A wrong name is answered with the nearest one; a name that Keras has is looked up there.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaler.errors import InvalidArgument

SMALLEST_SCALE = 2.0**-126
"""The least loss scale: the smallest float32 whose reciprocal and itself are both normal numbers."""
LARGEST_SCALE = 2.0**126
"""The greatest loss scale: above it the reciprocal is subnormal, and kernels that flush subnormals make it 0."""


def is_symbolic(value: object) -> bool:
    """Whether `value` is a tensor or variable, known only when the step runs."""
    return tf.is_tensor(value) or isinstance(value, tf.Variable)


def check_scale(name: str, value: object) -> None:
    """Refuses a loss scale outside [2^-126, 2^126]."""
    check_number(name, value, "a finite number in [2^-126, 2^126]", lambda v: SMALLEST_SCALE <= v <= LARGEST_SCALE)


def check_bounds(min_scale: object, initial_scale: object, max_scale: object) -> None:
    """Refuses three numbers that are not loss scales, or not in this order."""
    bounds: dict[str, Any] = {"min_scale": min_scale, "initial_scale": initial_scale, "max_scale": max_scale}
    for name, value in bounds.items():
        check_scale(name, value)
    if any(map(is_symbolic, bounds.values())):
        return
    values = list(map(float, bounds.values()))
    if values != sorted(values):
        raise InvalidArgument(
            f"{', '.join(f'{name}={value!r}' for name, value in bounds.items())}: expected min_scale <= initial_scale "
            "<= max_scale. Move the bound, or start inside it."
        )


def check_growth_factor(value: object) -> None:
    """Refuses a growth factor that does not grow the scale."""
    check_number("growth_factor", value, "a number in (1, 2^126]", lambda v: 1 < v <= LARGEST_SCALE)


def check_backoff_factor(value: object) -> None:
    """Refuses a backoff factor that does not shrink the scale."""
    check_number("backoff_factor", value, "a number in [2^-126, 1)", lambda v: SMALLEST_SCALE <= v < 1)


def check_number(name: str, value: object, allowed: str, accept: Callable[[float], bool]) -> None:
    """Refuses anything but a real number whose float32 value `accept` allows.

    Raises:
        InvalidArgument: With the name, the value, its type and what is allowed.
    """
    if is_symbolic(value):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{name}={value!r} ({type(value).__name__}): expected {allowed}.")
    try:
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(np.float32(value))
    except OverflowError:  # An integer beyond every float.
        rounded = math.nan
    if math.isnan(rounded) or not accept(rounded):
        raise InvalidArgument(f"{name}={value!r}: expected {allowed}, also after rounding to float32.")


def check_constant(name: str, value: object, allowed: str, accept: Callable[[float], bool]) -> None:
    """Refuses what `check_number` refuses, and tensors and variables: the number shapes the computation."""
    if is_symbolic(value):
        raise InvalidArgument(f"{name}={value!r}: expected {allowed}, as a Python number and not as a tensor.")
    check_number(name, value, allowed, accept)


def check_count(name: str, value: object, example: int) -> None:
    """Refuses anything but an integer in [1, 2^31 - 1]."""
    if is_symbolic(value):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= int(value) < 2**31:
        raise InvalidArgument(
            f"{name}={value!r} ({type(value).__name__}): expected an integer in [1, 2^31), such as {example}."
        )


def check_flag(name: str, value: object) -> None:
    """Refuses anything but a bool."""
    if not is_symbolic(value) and not isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r} ({type(value).__name__}): expected True or False.")


def takes_one(function: Any) -> bool:
    """Whether it can be called with one argument, as far as Python shows it."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # It has no signature that Python could read.
    return True


def as_variables(method: str, variables: object) -> list:
    """A list of variables; raises `InvalidArgument` for anything else."""
    found = list(variables) if isinstance(variables, Iterable) and not tf.is_tensor(variables) else [variables]
    wrong = next((one for one in found if not isinstance(one, (tf.Variable, keras.Variable))), None)
    if wrong is not None or isinstance(variables, (tf.Variable, keras.Variable)):
        what = variables if wrong is None else wrong
        raise InvalidArgument(
            f"{method}: an object of type {type(what).__name__} in the place of variables: expected a list of "
            "tf.Variable or keras.Variable, such as model.trainable_variables."
        )
    return found


def as_flag(name: str, value: object) -> bool | tf.Tensor:
    """A scalar bool: as Python's where it is known now, else as a tensor.

    Raises:
        InvalidArgument: For anything else.
    """
    flag = value if isinstance(value, bool) else None
    if flag is None and (isinstance(value, np.bool_) or is_symbolic(value)):
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype == tf.bool and tensor.shape.rank in (0, None):
            known = tf.get_static_value(tensor)
            return tensor if known is None else bool(known)
    if flag is None:
        kind = type(value).__name__
        raise InvalidArgument(f"{name}={value!r} ({kind}): expected True, False or a scalar bool tensor.")
    return flag


def as_scale(name: str, value: Any) -> tf.Tensor:
    """Returns a scale as a scalar float32 tensor.

    Raises:
        InvalidArgument: If it is no scalar number, or known to be outside [2^-126, 2^126].
    """
    if isinstance(value, float) or (is_symbolic(value) and value.dtype.is_floating and value.shape.rank in (0, None)):
        found = as_float(value)
        known = tf.get_static_value(found)
        if known is not None:
            check_scale(name, float(known))
        return tf.ensure_shape(found, [])
    raise InvalidArgument(f"{name}={value!r}: expected a scalar of a floating dtype, such as outcome.loss_scale.")


def scale_or_nan(loss_scale: tf.Tensor) -> tf.Tensor:
    """The scale, or NaN where a running graph finds that it is none: the step is then skipped."""
    valid = tf.logical_and(loss_scale >= SMALLEST_SCALE, loss_scale <= LARGEST_SCALE)
    return loss_scale if tf.executing_eagerly() else tf.where(valid, loss_scale, float("nan"))


def as_loss(loss: Any) -> tf.Tensor:
    """Returns a loss as a tensor.

    Raises:
        InvalidArgument: If it is no scalar of a floating dtype.
    """
    if loss is None:
        raise InvalidArgument("scale(None): expected the loss, a floating-point scalar. Does its function return it?")
    if isinstance(loss, (tuple, list, dict)) or callable(loss):
        raise InvalidArgument(f"scale({type(loss).__name__}): expected a scalar, the loss alone.")
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise InvalidArgument(
            f"scale(loss): the loss has dtype {loss.dtype.name}: expected a floating-point scalar. Cast it first."
        )
    if loss.shape.rank == 1 and loss.shape[0] == 0:
        raise InvalidArgument(
            "scale(loss): the loss has shape (0,): was the batch empty? Keras's losses give no scalar for a batch that "
            "is known to have no rows. Leave such batches out."
        )
    if loss.shape.rank not in (0, None):
        raise InvalidArgument(
            f"scale(loss): the loss has shape {loss.shape}: expected a scalar. Reduce it first, such as with "
            "tf.reduce_mean(loss)."
        )
    return loss


def within(values: tf.Tensor, low: float | tf.Tensor, high: float | tf.Tensor) -> tf.Tensor:
    """`tf.clip_by_value` in one operation instead of two: every step clips several times.

    Args:
        values: Of any shape.
        low: Scalar.
        high: Scalar.
    """
    low, high = as_dtype(low, values.dtype), as_dtype(high, values.dtype)
    return tf.raw_ops.ClipByValue(t=values, clip_value_min=low, clip_value_max=high)


def as_float(value: float | tf.Tensor | tf.Variable) -> tf.Tensor:
    """A checked number, tensor or variable as a float32 tensor."""
    return tf.cast(value if is_symbolic(value) else float(value), tf.float32)


def as_count(value: int | tf.Tensor | tf.Variable, like: tf.Tensor) -> tf.Tensor:
    """A checked integer, tensor or variable in the integer dtype that the count `like` is kept in."""
    return as_dtype(value, getattr(like, "dtype", tf.int32))


def as_dtype(value: float | tf.Tensor | tf.Variable, dtype: tf.DType) -> tf.Tensor:
    """A number, tensor or variable as a tensor of this dtype."""
    # In a graph `tf.cast` would make an int32 constant of a Python integer, and an operation that casts it.
    return tf.constant(value, dtype) if isinstance(value, numbers.Number) else tf.cast(value, dtype)


_DONE: set[Callable] = set()
"""A class may be public in two modules, or have the constructor of another public class."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about a wrong name, such as " Did you mean 'adam'?"; empty if no known one is near."""
    names = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), names, n=1) if isinstance(name, str) else []
    return f" Did you mean {names[found[0]]!r}?" if found and names[found[0]] != name else ""


def from_keras(module: Any, given: Any) -> Any:
    """What Keras's `compile` makes of a name; an unknown name, and anything else, as it is.

    Args:
        module: `keras.optimizers`, `keras.losses` or `keras.metrics`.
        given: The argument of a user.
    """
    try:
        return module.get(given) if isinstance(given, str) else given
    except (ValueError, KeyError, TypeError):  # The latter two where its class needs arguments.
        return given


def suggest_arguments(namespace: Mapping[str, Any]) -> None:
    """Makes the public classes of a module answer a wrong keyword argument with the nearest name.

    Args:
        namespace: The module's `globals()`, with `__all__`.
    """
    for cls in (namespace.get(name) for name in namespace["__all__"]):
        method = "__new__" if isinstance(cls, type) and issubclass(cls, tuple) else "__init__"
        make = getattr(cls, method, None)
        # The function of a Protocol replaces itself when it is first called.
        if isinstance(cls, type) and inspect.isfunction(make) and make.__module__ != "typing" and make not in _DONE:
            suggesting = _suggesting(cls, make)
            _DONE.add(suggesting)
            setattr(cls, method, staticmethod(suggesting) if method == "__new__" else suggesting)


def _suggesting(cls: type, make: Callable) -> Callable:
    """A class's constructor, which names the nearest argument."""

    @functools.wraps(make)
    def suggesting(self: Any, /, *arguments: Any, **named: Any) -> Any:
        try:
            return make(self, *arguments, **named)
        except TypeError:
            parameters = inspect.signature(make).parameters
            wrong = next((name for name in named if name not in parameters), None)
            if wrong is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                raise
            # A subclass may pass a wrong name to the constructor of its base.
            own = self if isinstance(self, type) else type(self)
            who = own if getattr(own, make.__name__) is suggesting else cls
            known = list(parameters)[1:]
            raise TypeError(f"{who.__name__}() has no argument {wrong!r}.{did_you_mean(wrong, known)}") from None

    return suggesting
