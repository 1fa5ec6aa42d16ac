"""Products whose operands are rounded, and whose gradients are products of rounded operands.

A product of x and w, and of its gradient dy, is three products: y of x and w, dx of dy and w, dw of x and dy. Each sums
over other axes, and blocks lie along the axes that are summed over. So in formats of blocks an operand is rounded again
for each of its two products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.formats.accumulators import Accumulator, Convolution, Einsum

Bilinear = Einsum | Convolution
Axes = tuple[int, ...]
Round = Callable[[tf.Tensor, Axes], tf.Tensor]
"""Rounds a float32 tensor, whose blocks lie along some axes."""


class Summed(NamedTuple):
    """The axes that each of the three products sums over, in each of its operands.

    Attributes:
        left: Of the left operand, in the product itself.
        right: Of the right operand, in the product itself.
        gradient_for_left: Of the product's gradient, in the gradient of the left operand.
        right_again: Of the right operand, there.
        gradient_for_right: Of the product's gradient, in the gradient of the right operand.
        left_again: Of the left operand, there.
    """

    left: Axes
    right: Axes
    gradient_for_left: Axes
    right_again: Axes
    gradient_for_right: Axes
    left_again: Axes


class Rounding(NamedTuple):
    """How the operands are rounded.

    Attributes:
        left: The left operand.
        right: The right operand.
        gradient: The product's gradient.
        operands_in_blocks: Whether rounding the operands depends on the axes. Without it each is rounded once.
        gradient_in_blocks: The same of the gradient.
    """

    left: Round
    right: Round
    gradient: Round
    operands_in_blocks: bool
    gradient_in_blocks: bool


def product(
    bilinear: Bilinear,
    left: tf.Tensor,
    right: tf.Tensor,
    summed: Summed,
    rounding: Rounding,
    accumulator: Accumulator | None = None,
) -> tf.Tensor:
    """A bilinear function of rounded operands.

    Args:
        bilinear: Linear in each of two float32 tensors.
        left: Of any floating dtype, which the result has, too.
        right: The same.
        summed: The axes.
        rounding: How operands are rounded.
        accumulator: How the three products sum. If not given, in float32, in the order of the device's kernel.
    """
    dtype = left.dtype
    function = functools.partial(bilinear, accumulator=accumulator)

    @tf.custom_gradient
    def of_rounded(left: tf.Tensor, right: tf.Tensor) -> tuple:
        first = _straight_through(rounding.left, left, summed.left)
        second = _straight_through(rounding.right, right, summed.right)

        def gradients(upstream: tf.Tensor) -> tuple:
            upstream = tf.cast(upstream, tf.float32)
            for_left = _straight_through(rounding.gradient, upstream, summed.gradient_for_left)
            for_right = for_left
            if rounding.gradient_in_blocks:
                for_right = _straight_through(rounding.gradient, upstream, summed.gradient_for_right)
            if not rounding.operands_in_blocks and for_right is for_left:
                return _gradients(function, first, second, for_left)
            first_again, second_again = first, second
            if rounding.operands_in_blocks:
                first_again = _straight_through(rounding.left, left, summed.left_again)
                second_again = _straight_through(rounding.right, right, summed.right_again)
            of_left = _gradients(function, first, second_again, for_left)[0]
            return of_left, _gradients(function, first_again, second, for_right)[1]

        return tf.cast(function(first, second), dtype), gradients

    return of_rounded(tf.cast(left, tf.float32), tf.cast(right, tf.float32))


def _straight_through(rounds: Round, values: tf.Tensor, axes: Axes) -> tf.Tensor:
    """Rounded values, whose gradient is that of the values: second derivatives go through them, too."""

    @tf.custom_gradient
    def rounded(values: tf.Tensor) -> tuple:
        return rounds(values, axes), lambda upstream: upstream

    return rounded(values)


def _gradients(
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], left: tf.Tensor, right: tf.Tensor, upstream: tf.Tensor
) -> tuple:
    """What is not linear in its operand does not enter its gradient, so that a graph computes no product again."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([left, right])
        result = function(left, right)
    return tuple(tape.gradient(result, [left, right], upstream))


def summed_by(equation: str, left: int, right: int) -> tuple[str, Summed]:
    """An equation of `tf.einsum` without ellipses, and the axes that it sums over.

    Args:
        equation: Of two operands.
        left: The rank of the left operand.
        right: The rank of the right operand.

    Raises:
        InvalidArgument: For an equation of another form.
    """
    one, two, result = _labels(equation, left, right)

    def axes(operand: str, other: str, kept: str) -> Axes:
        """In the order of the labels, so that blocks of both operands hold the same terms."""
        common = sorted(label for label in set(operand) & set(other) - set(kept))
        return tuple(operand.index(label) for label in common)

    return f"{one},{two}->{result}", Summed(
        left=axes(one, two, result),
        right=axes(two, one, result),
        gradient_for_left=axes(result, two, one),
        right_again=axes(two, result, one),
        gradient_for_right=axes(result, one, two),
        left_again=axes(one, result, two),
    )


def _labels(equation: str, left: int, right: int) -> tuple[str, str, str]:
    """The labels of both operands and of the result, without ellipses."""
    if not isinstance(equation, str):
        raise InvalidArgument(f"equation {equation!r}: expected text, such as 'ab,bc->ac'.")
    operands, arrow, result = equation.replace(" ", "").partition("->")
    one, comma, two = operands.partition(",")
    if not arrow or not comma or "," in two:
        raise InvalidArgument(
            f"equation {equation!r}: expected one of two operands with a result, such as 'ab,bc->ac'."
        )
    free = [label for label in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if label not in equation]
    extra = {len(free[: rank - len(text) + 3]) for text, rank in ((one, left), (two, right)) if "..." in text}
    stands_for = "".join(reversed(free[: max(extra, default=0)]))

    def plain(text: str, rank: int | None) -> str:
        count = len(stands_for) if rank is None else rank - len(text) + 3
        # The last of them are broadcast against the last of the other's.
        return text.replace("...", stands_for[len(stands_for) - count :])

    found = plain(one, left), plain(two, right), plain(result, None)
    if len(found[0]) != left or len(found[1]) != right:
        raise InvalidArgument(f"equation {equation!r}: operands of rank {left} and {right} do not fit.")
    return found
