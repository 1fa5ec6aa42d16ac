"""Clipping: how unscaled gradients are limited before the optimizer sees them.

Every clipping has the same members: `valid`, `limiter`, `squares_after` and `limits_all_alike`. The gate has
measured the norms already, so clipping by a norm needs no other pass over the gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import tensorflow as tf

from scaler.checks import SMALLEST_SCALE, as_float, check_number, is_symbolic
from scaler.errors import InvalidArgument
from scaler.gradients import lists

Limiter: TypeAlias = Callable[[tf.Tensor, int | None], tf.Tensor]
"""Takes an unscaled gradient's values and its position among the gradients; returns the limited values."""


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scales all gradients down together if their global norm is above `norm`. `clip_norm=` makes one.

    Attributes:
        norm: Positive scalar.
    """

    norm: float | tf.Tensor

    limits_all_alike: ClassVar[bool] = True
    """Whether a gradient is limited alike wherever it stands among the others."""

    def __post_init__(self) -> None:
        _check("clip_norm", self.norm)

    def valid(self) -> tf.Tensor:
        """Whether the limit is a positive finite number, scalar bool: a tensor's value was not known before."""
        return _valid(self.norm)

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients of these squared norms, float32 [n]."""
        factor = self._factor(squares)
        return lambda values, position: values * tf.cast(factor, values.dtype)

    def squares_after(self, squares: tf.Tensor) -> tf.Tensor:
        """The squared norms afterwards; exactly those before where nothing is clipped."""
        factor = self._factor(squares)
        return squares * factor * factor

    def _factor(self, squares: tf.Tensor) -> tf.Tensor:
        return lists.clip_factor(tf.sqrt(tf.reduce_sum(squares)), self.norm)


@dataclasses.dataclass(frozen=True)
class ClipByNorm:
    """Scales each gradient down if its own norm is above `norm`, as `tf.clip_by_norm` does.

    Attributes:
        norm: Positive scalar.

    Raises:
        InvalidArgument: For another value.
    """

    norm: float | tf.Tensor

    limits_all_alike: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check("ClipByNorm: norm", self.norm)

    def valid(self) -> tf.Tensor:
        """Whether the limit is a positive finite number, scalar bool: a tensor's value was not known before."""
        return _valid(self.norm)

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients of these squared norms, float32 [n]."""
        factors = tf.unstack(self._factors(squares), num=squares.shape[0])

        def limit(values: tf.Tensor, position: int | None) -> tf.Tensor:
            assert position is not None
            return values * tf.cast(factors[position], values.dtype)

        return limit

    def squares_after(self, squares: tf.Tensor) -> tf.Tensor:
        """The squared norms afterwards; exactly those before where nothing is clipped."""
        factors = self._factors(squares)
        return squares * factors * factors

    def _factors(self, squares: tf.Tensor) -> tf.Tensor:
        return lists.clip_factor(tf.sqrt(squares), self.norm)


@dataclasses.dataclass(frozen=True)
class ClipByValue:
    """Limits each value of each gradient to [-value, value], as `tf.clip_by_value` does. This changes the direction.

    Attributes:
        value: Positive scalar.

    Raises:
        InvalidArgument: For another value.
    """

    value: float | tf.Tensor

    limits_all_alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check("ClipByValue: value", self.value)

    def valid(self) -> tf.Tensor:
        """Whether the limit is a positive finite number, scalar bool: a tensor's value was not known before."""
        return _valid(self.value)

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients; their squared norms do not matter."""
        del squares

        def limit(values: tf.Tensor, position: int | None) -> tf.Tensor:
            largest = lists.number_as(self.value, values.dtype)
            return tf.clip_by_value(values, -largest, largest)

        return limit

    def squares_after(self, squares: tf.Tensor) -> None:
        """None: it depends on the values, not on their norms."""


@dataclasses.dataclass(frozen=True)
class ScaleEach:
    """Multiplies each gradient by a factor of its own, then limits them as `then` does. A `SpikeGuard` makes one.

    Attributes:
        factors: Float32 or float64 [gradients], in [0, 1]: exactly 1 where a gradient stays as it is.
        then: Another clipping, or None.
    """

    factors: tf.Tensor
    then: Clipping | None

    limits_all_alike: ClassVar[bool] = False

    def valid(self) -> tf.Tensor:
        """Whether the limit of the other clipping is valid, scalar bool."""
        return tf.constant(True) if self.then is None else self.then.valid()

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients of these squared norms, float32 [n]."""
        factors = tf.unstack(self.factors, num=self.factors.shape[0])
        then = None if self.then is None else self.then.limiter(self.scaled(squares))

        def limit(values: tf.Tensor, position: int | None) -> tf.Tensor:
            assert position is not None
            scaled = values * tf.cast(factors[position], values.dtype)
            return scaled if then is None else then(scaled, position)

        return limit

    def squares_after(self, squares: tf.Tensor) -> tf.Tensor | None:
        """The squared norms afterwards; exactly those before where nothing is limited."""
        scaled = self.scaled(squares)
        return scaled if self.then is None else self.then.squares_after(scaled)

    def scaled(self, squares: tf.Tensor) -> tf.Tensor:
        """The squared norms before the other clipping."""
        factors = tf.cast(self.factors, squares.dtype)
        return squares * factors * factors


Clipping: TypeAlias = ClipByGlobalNorm | ClipByNorm | ClipByValue | ScaleEach


def clipping_of(clip_norm: float | tf.Tensor | None, clip: ClipByNorm | ClipByValue | None) -> Clipping | None:
    """The one clipping that two arguments ask for.

    Raises:
        InvalidArgument: If both are given, or `clip` is not a clipping.
    """
    if clip is not None and not isinstance(clip, (ClipByNorm, ClipByValue)):
        raise InvalidArgument(
            f"clip={clip!r}: expected hs.ClipByNorm(1.0), hs.ClipByValue(1.0) or None. For the global norm, "
            "pass clip_norm=1.0."
        )
    if clip is not None and clip_norm is not None:
        raise InvalidArgument(
            f"clip_norm={clip_norm!r} and clip={clip!r}: expected one of them, since the result would depend on which "
            "comes first. For both, unscale and clip by yourself: LossScaler.unscale."
        )
    return clip if clip_norm is None else ClipByGlobalNorm(clip_norm)


def _check(name: str, value: object) -> None:
    allowed = "a positive finite number, at least 2^-126"
    allowed += ", or None" if name == "clip_norm" else ""
    check_number(name, value, allowed, lambda v: SMALLEST_SCALE <= v < math.inf)


def _valid(value: float | tf.Tensor) -> tf.Tensor:
    if not is_symbolic(value):
        return tf.constant(True)  # It was checked when it was given.
    limit = as_float(value)
    return tf.logical_and(limit > 0.0, tf.math.is_finite(limit))
