"""Sums of products in an accumulator that is narrower than float32, in an order of their own.

The products along what is summed over, flattened in the order of the equation's sorted labels, come `chunk` at a time:

    part  = 0; for each product of the chunk, in order: part = part + product      in float32
    total = round(total + part)                                                     to the accumulator's format

A product and a sum are each rounded to float32 first, so `total + part` is rounded twice. An addition that depends on a
kernel, or that a compiler may fuse with the product in front of it, would give other bits on another device: products
are settled before they are added.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import bits
from scaler.errors import InvalidArgument
from scaler.formats.elements import ELEMENTS
from scaler.formats.rounding import round_float32

ACCUMULATORS = ("float16", "bfloat16")
"""The formats of accumulators."""
CHUNK = 16
"""How many products a tensor core sums in one instruction: k of m16n8k16, in NVIDIA/cutlass,
include/cutlass/arch/mma_sm80.h, which has it with accumulators in float16, too."""
_LEAST_NORMAL = 0x00800000
_LONGEST = 2**30
"""No axis is longer, and the end of a chunk is still an int32."""


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """How products are summed.

    Attributes:
        format: What the running sum is rounded to, to nearest even, after each addition. Beyond its largest value it is
            infinite.
        chunk: How many products are summed in float32 before each addition.
    """

    format: str
    chunk: int

    def sum(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """The sums over k of left[k, b, m] * right[k, b, n], as a loop that holds one product of each at a time.

        Args:
            left: Float32 [K, B, M].
            right: Float32 [K, B, N].

        Returns:
            Float32 [B, M, N], of values of the format. No gradient passes through.
        """
        length = sizes_of(left)[0]
        zero = tf.zeros([*sizes_of(left)[1:], sizes_of(right)[2]])
        element, chunk = ELEMENTS[self.format], min(self.chunk, _LONGEST)

        def product(k: Any) -> tf.Tensor:
            return _settled(left[k][:, :, tf.newaxis] * right[k][:, tf.newaxis, :])

        def part(first: Any, last: Any) -> tf.Tensor:
            if chunk == 1:
                return product(first)

            def longer(k: Any, so_far: tf.Tensor) -> tuple:
                return k + 1, _shaped(so_far + product(k), zero)

            return tf.while_loop(lambda k, _: k < last, longer, (first, zero))[1]

        def after(first: Any, total: tf.Tensor) -> tuple:
            last = _least(first + chunk, length)
            return last, _shaped(round_float32(total + part(first, last), element, False), zero)

        return tf.while_loop(lambda first, _: first < length, after, (0, zero))[1]


def _settled(products: tf.Tensor) -> tf.Tensor:
    """Products as float32 holds them, 0 in place of -0.0 and of what is subnormal, which kernels may take for 0.

    The choice by its bits stands between a product and the addition that follows. So a compiler cannot contract
    both to one operation that does not round the product, nor take 0 + x for x.
    """
    return tf.where(bits.constant(_LEAST_NORMAL) > bits.magnitude_bits(products), 0.0, products)


def _least(one: Any, other: Any) -> Any:
    """The lesser of two lengths, a number if both are."""
    return tf.minimum(one, other) if tf.is_tensor(one) or tf.is_tensor(other) else min(one, other)


def _shaped(values: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """A loop's variable keeps the shape that it began with."""
    values.set_shape(like.shape)
    return values


def sizes_of(values: tf.Tensor) -> list:
    """A tensor's shape: numbers where they are known, and scalars elsewhere."""
    return [tf.shape(values)[axis] if size is None else size for axis, size in enumerate(values.shape)]


def contract(equation: str, left: tf.Tensor, right: tf.Tensor, accumulator: Accumulator) -> tf.Tensor:
    """A product by an equation, whose gradients are products by equations, and sum in the same way.

    Args:
        equation: Of two operands, without ellipses.
        left: Float32.
        right: Float32.
        accumulator: How it sums.

    Raises:
        InvalidArgument: For an equation with a diagonal, or with a label in one operand alone.
    """
    operands, _, result = equation.partition("->")
    one, _, two = operands.partition(",")
    _check(equation, (one, two, result))

    @tf.custom_gradient
    def of_operands(left: tf.Tensor, right: tf.Tensor) -> tuple:
        def gradients(upstream: tf.Tensor) -> tuple:
            return (
                contract(f"{result},{two}->{one}", upstream, right, accumulator),
                contract(f"{one},{result}->{two}", left, upstream, accumulator),
            )

        return _contracted(one, two, result, left, right, accumulator), gradients

    return of_operands(left, right)


def _check(equation: str, three: tuple[str, str, str]) -> None:
    """With each label in two of the three, an equation of the gradients has the same form."""
    for label in sorted(set("".join(three))):
        if any(each.count(label) > 1 for each in three) or sum(label in each for each in three) < 2:
            raise InvalidArgument(
                f"equation {equation!r}: with accumulators= a label stands at most once in each operand and in the "
                f"result, and in two of these three; {label!r} does not. Take the diagonal, or sum over the axis of "
                "one operand, before the product, or leave accumulators= out."
            )


def _contracted(
    one: str, two: str, result: str, left: tf.Tensor, right: tf.Tensor, accumulator: Accumulator
) -> tf.Tensor:
    """The value of an equation, by the labels of its operands and its result."""
    sizes = _sizes_by_label(one, two, left, right)
    summed = sorted(label for label in one if label in two and label not in result)
    shared = [label for label in one if label in two and label in result]
    of_left = [label for label in one if label not in two]
    of_right = [label for label in two if label not in one]

    def flat(values: tf.Tensor, operand: str, own: list[str]) -> tf.Tensor:
        values = _transposed(values, [operand.index(label) for label in (*summed, *shared, *own)])
        return tf.reshape(values, [count_of([sizes[label] for label in labels]) for labels in (summed, shared, own)])

    found = accumulator.sum(flat(left, one, of_left), flat(right, two, of_right))
    kept = [*shared, *of_left, *of_right]
    found = tf.reshape(found, [sizes[label] for label in kept])
    return _transposed(found, [kept.index(label) for label in result])


def _sizes_by_label(one: str, two: str, left: tf.Tensor, right: tf.Tensor) -> dict[str, Any]:
    """The size of each label: a number where an operand knows it."""
    sizes = dict(zip(one, sizes_of(left), strict=True))
    for label, size in zip(two, sizes_of(right), strict=True):
        known = sizes.setdefault(label, size)
        if tf.is_tensor(known):
            sizes[label] = size
        elif not tf.is_tensor(size) and size != known:
            raise InvalidArgument(
                f"equation '{one},{two}->…': {label!r} is an axis of {known} in one operand and of {size} in the other."
            )
    return sizes


def count_of(sizes: Sequence[Any]) -> Any:
    """The product of sizes, a number if all are."""
    return functools.reduce(operator.mul, sizes, 1)


def _transposed(values: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    return values if list(order) == list(range(len(order))) else tf.transpose(values, order)
