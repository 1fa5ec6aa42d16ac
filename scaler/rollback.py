"""Putting variables back as they were before a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from scaler.backend.autograph import as_written
from scaler.errors import InvalidArgument
from scaler.mistakes.moving_statistics import warn_if_late


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Variables and the values they had, made by `snapshot`."""

    variables: tuple
    values: tuple[tf.Tensor, ...]

    @as_written
    def restore(self) -> None:
        """Assigns every variable the value it had, bit for bit."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)

    @as_written
    def restore_nonfinite(self) -> None:
        """Assigns the value they had to those elements that are not finite now."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(keep_finite(variable, value))


@as_written
def snapshot(variables: Iterable) -> Snapshot:
    """Remembers the values of `variables`, for the `rollback` argument of `LossScaler.apply`.

    Take it before the forward pass, which already moves BatchNorm's statistics and seed generators:
    `before = scaler.snapshot(model.non_trainable_variables)`. Inside a `tf.function` it belongs to one call.

    Args:
        variables: `tf.Variable`s or Keras variables of any dtype and shape.

    Raises:
        InvalidArgument: For a model instead of its variables, or what is no list.
    """
    if isinstance(variables, keras.layers.Layer):
        raise InvalidArgument("snapshot(model): expected variables: model.non_trainable_variables.")
    if not isinstance(variables, Iterable):
        raise InvalidArgument(f"snapshot({variables!r}): expected a list of variables.")
    variables = tuple(variables)
    warn_if_late(variables)
    return Snapshot(variables, tuple(tf.identity(variable) for variable in variables))


def keep_finite(now: Any, before: tf.Tensor) -> tf.Tensor:
    """The value of a variable now, but the one before where it stopped being finite.

    A moving statistic kept in float16 can overflow on a step whose loss and gradients are finite.
    """
    value = tf.convert_to_tensor(now)
    return tf.where(tf.math.is_finite(value), value, before) if value.dtype.is_floating else value
