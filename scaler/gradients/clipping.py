"""How unscaled gradients are limited before an optimizer sees them.

Every clipping has the same three members: `valid`, `limiter` and `squares_after`. Norms are those that the
gate has measured already, so that clipping by them costs no pass over the gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from scaler.checks import SMALLEST_SCALE, as_float, check_number, is_symbolic
from scaler.errors import InvalidArgument
from scaler.gradients import lists

Limiter: TypeAlias = Callable[[tf.Tensor, int | None], tf.Tensor]
"""Of an unscaled gradient's values, float32, and its position among the gradients: the values that may pass."""


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm:
    """All gradients are scaled down together where their global norm is above `norm`. `clip_norm=` makes one.

    Attributes:
        norm: Positive scalar.
    """

    norm: float | tf.Tensor

    def __post_init__(self) -> None:
        _check("clip_norm", self.norm)

    def valid(self) -> tf.Tensor:
        """Whether the limit is a positive finite number, scalar bool: of a tensor nobody knew before."""
        return _valid(self.norm)

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients of these squared norms, float32 [n]."""
        factor = self._factor(squares)
        return lambda values, position: values * factor

    def squares_after(self, squares: tf.Tensor) -> tf.Tensor:
        """The squared norms afterwards; exactly those before where nothing is clipped."""
        factor = self._factor(squares)
        return squares * factor * factor

    def _factor(self, squares: tf.Tensor) -> tf.Tensor:
        return lists.clip_factor(tf.sqrt(tf.reduce_sum(squares)), self.norm)


@dataclasses.dataclass(frozen=True)
class ClipByNorm:
    """Each gradient is scaled down by itself where its own norm is above `norm`, as by `tf.clip_by_norm`.

    Attributes:
        norm: Positive scalar.

    Raises:
        InvalidArgument: For another value.
    """

    norm: float | tf.Tensor

    def __post_init__(self) -> None:
        _check("ClipByNorm: norm", self.norm)

    def valid(self) -> tf.Tensor:
        """Whether the limit is a positive finite number, scalar bool: of a tensor nobody knew before."""
        return _valid(self.norm)

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients of these squared norms, float32 [n]."""
        factors = tf.unstack(self._factors(squares), num=squares.shape[0])

        def limit(values: tf.Tensor, position: int | None) -> tf.Tensor:
            assert position is not None
            return values * factors[position]

        return limit

    def squares_after(self, squares: tf.Tensor) -> tf.Tensor:
        """The squared norms afterwards; exactly those before where nothing is clipped."""
        factors = self._factors(squares)
        return squares * factors * factors

    def _factors(self, squares: tf.Tensor) -> tf.Tensor:
        return lists.clip_factor(tf.sqrt(squares), self.norm)


@dataclasses.dataclass(frozen=True)
class ClipByValue:
    """Each value of each gradient is limited to [-value, value], as by `tf.clip_by_value`. This turns the gradient.

    Attributes:
        value: Positive scalar.

    Raises:
        InvalidArgument: For another value.
    """

    value: float | tf.Tensor

    def __post_init__(self) -> None:
        _check("ClipByValue: value", self.value)

    def valid(self) -> tf.Tensor:
        """Whether the limit is a positive finite number, scalar bool: of a tensor nobody knew before."""
        return _valid(self.value)

    def limiter(self, squares: tf.Tensor) -> Limiter:
        """What is done to gradients, whatever their squared norms."""
        del squares
        largest = as_float(self.value)
        return lambda values, position: tf.clip_by_value(values, -largest, largest)

    def squares_after(self, squares: tf.Tensor) -> None:
        """Nothing: only the values themselves can tell."""


Clipping: TypeAlias = ClipByGlobalNorm | ClipByNorm | ClipByValue


def clipping_of(clip_norm: float | tf.Tensor | None, clip: ClipByNorm | ClipByValue | None) -> Clipping | None:
    """The one clipping that two arguments ask for.

    Raises:
        InvalidArgument: If both are given, or one is no clipping.
    """
    if clip is not None and not isinstance(clip, (ClipByNorm, ClipByValue)):
        raise InvalidArgument(
            f"clip={clip!r}: expected scaler.ClipByNorm(1.0), scaler.ClipByValue(1.0) or None. For the global norm, "
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
