"""The arithmetic of other people's scalers, bit for bit, on hardware and compilers that prefer other arithmetic.

Everything is computed in double precision and then rounded to what the original holds. For an original in float32
that is float32's own result: one product, quotient or sum of two float32 numbers, rounded to double precision first
and to float32 second, is the correctly rounded float32 one. A division is always by a selected value and never by a
constant, since both Grappler and XLA replace division by a constant with multiplication by its rounded reciprocal.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_scale, is_symbolic


class EveryStep:
    """A rule sees steps that bad data skipped, too, and counts in int64 where asked."""

    int64_counts: ClassVar[bool] = True
    sees_every_step: ClassVar[bool] = True


def as_double(value: float | tf.Tensor) -> tf.Tensor:
    """A checked number, tensor or variable in float64."""
    # tf.cast would round a Python number to float32 on its way.
    return tf.cast(value, tf.float64) if is_symbolic(value) else tf.constant(float(value), tf.float64)


def single(value: float | tf.Tensor) -> float | tf.Tensor:
    """A number, tensor or variable rounded to float32, as a float or a float64 tensor, as a float32 original has it."""
    return tf.cast(tf.cast(value, tf.float32), tf.float64) if is_symbolic(value) else float(np.float32(value))


def first(kind: Any, scale: float | tf.Tensor, *rest: tf.Tensor) -> Any:
    """The state before the first step, whose first two fields are `loss_scale` and `exact_scale`."""
    exact = as_double(scale)
    return kind(tf.cast(exact, tf.float32), exact, *rest)


def held(state: Any) -> tf.Tensor:
    """The exact scale in float64, or the loss scale where that was changed from outside, as by a foreign checkpoint."""
    same = tf.equal(tf.cast(state.exact_scale, tf.float32), state.loss_scale)
    return tf.where(same, state.exact_scale, tf.cast(state.loss_scale, tf.float64))


def after(
    state: Any, scale: tf.Tensor, low: float = SMALLEST_SCALE, high: float = LARGEST_SCALE, **fields: tf.Tensor
) -> Any:
    """The next state: a float64 scale within bounds, where itself and its reciprocal are normal float32 numbers."""
    exact = tf.clip_by_value(scale, as_double(low), as_double(high))
    return state._replace(loss_scale=tf.cast(exact, tf.float32), exact_scale=exact, **fields)


def change(
    scale: tf.Tensor, where: tf.Tensor, factor: float | tf.Tensor, divisor: float | tf.Tensor = 1.0
) -> tf.Tensor:
    """`scale * factor / divisor` where asked for, else `scale`; one of the two numbers is 1."""
    one = as_double(1.0)
    return scale * tf.where(where, as_double(factor), one) / tf.where(where, as_double(divisor), one)


def smaller(a: float | tf.Tensor, b: float | tf.Tensor) -> float | tf.Tensor:
    """The smaller of two numbers or tensors."""
    return tf.minimum(as_double(a), as_double(b)) if is_symbolic(a) or is_symbolic(b) else min(a, b)


def larger(a: float | tf.Tensor, b: float | tf.Tensor) -> float | tf.Tensor:
    """The larger of two numbers or tensors."""
    return tf.maximum(as_double(a), as_double(b)) if is_symbolic(a) or is_symbolic(b) else max(a, b)


def checked_bound(name: str, value: float | None, if_none: float | None = None) -> float:
    """A bound of a scale, which some systems may go without."""
    if value is None and if_none is not None:
        return if_none
    check_scale(name, value)
    return value  # type: ignore[return-value]
