"""Products of two tensors, by an equation or as a convolution, and their sums in an accumulator narrower than float32.

The products along what is summed over, flattened in the order of the equation's sorted labels, come `chunk` at a time:

    part  = 0; for each product of the chunk, in order: part = part + product      in float32
    total = round(total + part)                                                     to the accumulator's format

A product and a sum are each rounded to float32 first, so `total + part` is rounded twice. An addition that depends on a
kernel, or that a compiler may fuse with the product in front of it, would give other bits on another device: products
are settled before they are added.

A convolution sums products of windows and kernels: y over the places of the kernel, row by row, and the channels at
each; dx over the same places and the kernel's outputs at each; dw over batch and positions. A place outside of the
picture counts as a 0, and in dx one from which no output comes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import bits
from scaler.backend.formats import ELEMENTS
from scaler.errors import InvalidArgument
from scaler.formats.tensors import round_float32

ACCUMULATORS = ("float16", "bfloat16")
"""The formats of accumulators."""
CHUNK = 16
"""How many products a tensor core sums in one instruction: k of m16n8k16, in NVIDIA/cutlass,
include/cutlass/arch/mma_sm80.h, which has it with accumulators in float16, too."""
_LEAST_NORMAL = 0x00800000
_LONGEST = 2**30
"""No axis is longer, and the end of a chunk is still an int32."""


@dataclasses.dataclass(frozen=True)
class Einsum:
    """A product by an equation.

    Attributes:
        equation: Of two operands, without ellipses.
    """

    equation: str

    def __call__(self, left: tf.Tensor, right: tf.Tensor, accumulator: Accumulator | None = None) -> tf.Tensor:
        """The product, by `tf.einsum` or in an accumulator."""
        if accumulator is not None:
            return _contract(self.equation, left, right, accumulator)
        return tf.einsum(self.equation, left, right)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution of pictures with a kernel, as a layer of Keras computes it.

    Attributes:
        strides: By spatial axis.
        padding: "valid" or "same".
        dilation: By spatial axis.
        data_format: "channels_last" or "channels_first".
    """

    strides: tuple[int, ...]
    padding: str
    dilation: tuple[int, ...]
    data_format: str

    def __call__(self, left: tf.Tensor, right: tf.Tensor, accumulator: Accumulator | None = None) -> tf.Tensor:
        """The convolution, by `keras.ops.conv` or in an accumulator."""
        if accumulator is not None:
            return _convolve(self, left, right, accumulator)
        return keras.ops.conv(left, right, list(self.strides), self.padding, self.data_format, self.dilation)


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
        length = _sizes_of(left)[0]
        zero = tf.zeros([*_sizes_of(left)[1:], _sizes_of(right)[2]])
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


def _positive(size: Any) -> Any:
    """At least 0."""
    return tf.maximum(size, 0) if tf.is_tensor(size) else max(size, 0)


def _shaped(values: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """A loop's variable keeps the shape that it began with."""
    values.set_shape(like.shape)
    return values


def _sizes_of(values: tf.Tensor) -> list:
    """A tensor's shape: numbers where they are known, and scalars elsewhere."""
    return [tf.shape(values)[axis] if size is None else size for axis, size in enumerate(values.shape)]


def _contract(equation: str, left: tf.Tensor, right: tf.Tensor, accumulator: Accumulator) -> tf.Tensor:
    """A product by an equation without ellipses, whose gradients are products by equations, and sum in the same way."""
    operands, _, result = equation.partition("->")
    one, _, two = operands.partition(",")
    _check(equation, (one, two, result))

    @tf.custom_gradient
    def of_operands(left: tf.Tensor, right: tf.Tensor) -> tuple:
        def gradients(upstream: tf.Tensor) -> tuple:
            return (
                _contract(f"{result},{two}->{one}", upstream, right, accumulator),
                _contract(f"{one},{result}->{two}", left, upstream, accumulator),
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
        return tf.reshape(values, [_count_of([sizes[label] for label in labels]) for labels in (summed, shared, own)])

    found = accumulator.sum(flat(left, one, of_left), flat(right, two, of_right))
    kept = [*shared, *of_left, *of_right]
    found = tf.reshape(found, [sizes[label] for label in kept])
    return _transposed(found, [kept.index(label) for label in result])


def _sizes_by_label(one: str, two: str, left: tf.Tensor, right: tf.Tensor) -> dict[str, Any]:
    """The size of each label: a number where an operand knows it."""
    sizes = dict(zip(one, _sizes_of(left), strict=True))
    for label, size in zip(two, _sizes_of(right), strict=True):
        known = sizes.setdefault(label, size)
        if tf.is_tensor(known):
            sizes[label] = size
        elif not tf.is_tensor(size) and size != known:
            raise InvalidArgument(
                f"equation '{one},{two}->…': {label!r} is an axis of {known} in one operand and of {size} in the other."
            )
    return sizes


def _count_of(sizes: Sequence[Any]) -> Any:
    """The product of sizes, a number if all are."""
    return functools.reduce(operator.mul, sizes, 1)


def _transposed(values: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """Values with their axes in another order."""
    return values if list(order) == list(range(len(order))) else tf.transpose(values, order)


def _convolve(convolution: Convolution, pictures: tf.Tensor, kernel: tf.Tensor, accumulator: Accumulator) -> tf.Tensor:
    """A convolution, whose three products sum in an accumulator. The kernel's shape is known.

    The gradients of its gradients add up overlapping windows in float32.
    """
    rank = len(convolution.strides)
    first = convolution.data_format == "channels_first"
    if first:
        pictures = tf.transpose(pictures, [0, *range(2, rank + 2), 1])
    if convolution.padding == "same":
        pictures = _padded(pictures, kernel, convolution)
    known = _Windows(pictures, kernel, convolution, accumulator)

    @tf.custom_gradient
    def of_operands(pictures: tf.Tensor, kernel: tf.Tensor) -> tuple:
        def gradients(upstream: tf.Tensor) -> tuple:
            return known.gradient_of_pictures(upstream, kernel), known.gradient_of_kernel(pictures, upstream)

        return known.product(pictures, kernel), gradients

    result = of_operands(pictures, kernel)
    return tf.transpose(result, [0, rank + 1, *range(1, rank + 1)]) if first else result


def _padded(pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution) -> tf.Tensor:
    """With zeros around, so that there is a position for each stride that begins in a picture: more of them behind."""
    around = []
    sizes = _sizes_of(pictures)[1:-1]
    for size, n, stride, step in zip(sizes, kernel.shape[:-2], convolution.strides, convolution.dilation, strict=True):
        missing = _positive((-(-size // stride) - 1) * stride + (n - 1) * step + 1 - size)
        around.append([missing // 2, missing - missing // 2])
    return tf.pad(pictures, [[0, 0], *around, [0, 0]])


class _Windows:
    """A convolution of pictures with their channels last, without padding. Sizes are numbers where they are known.

    Attributes:
        places: Of the kernel, by spatial axis.
        groups: Of channels.
        kernel: The kernel of each group: [places, channels, groups, outputs of a group].
        sizes: Of a picture, by spatial axis.
        counts: How many positions a window has, by spatial axis.
    """

    def __init__(self, pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution, accumulator: Accumulator):
        self.strides, self.dilation = convolution.strides, convolution.dilation
        *self.places, channels, outputs = kernel.shape
        self.batch, *self.sizes, every = _sizes_of(pictures)
        self.groups = every // channels
        self.kernel = (math.prod(self.places), channels, self.groups, outputs // self.groups)
        axes = zip(self.sizes, self.places, self.strides, self.dilation, strict=True)
        self.counts = [_positive((size - (n - 1) * step - 1) // stride + 1) for size, n, stride, step in axes]
        self._sum = functools.partial(_contract, accumulator=accumulator)

    def product(self, pictures: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """The convolution itself."""
        windows = self._windows(pictures, self.strides, self.counts)
        result = self._sum("nagb,abgc->ngc", windows, tf.reshape(kernel, self.kernel))
        return tf.reshape(result, [self.batch, *self.counts, kernel.shape[-1]])

    def gradient_of_pictures(self, upstream: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """A convolution of the outputs' gradient, backwards, at each pixel."""
        spread = _spread(upstream, self.strides)
        reach = [(n - 1) * step for n, step in zip(self.places, self.dilation, strict=True)]
        covered = [size + more for size, more in zip(_sizes_of(spread)[1:-1], reach, strict=True)]
        spread = tf.pad(spread, [[0, 0], *([more, more] for more in reach), [0, 0]])
        windows = self._windows(spread, (1,) * len(covered), covered, backwards=True)
        result = self._sum("nagb,acgb->ngc", windows, tf.reshape(kernel, self.kernel))
        result = tf.reshape(result, [self.batch, *covered, self.kernel[1] * self.groups])
        # Behind the last window there may be pixels that none reaches.
        rest = [[0, size - reached] for size, reached in zip(self.sizes, covered, strict=True)]
        return tf.pad(result, [[0, 0], *rest, [0, 0]])

    def gradient_of_kernel(self, pictures: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        """A sum over batch and positions."""
        windows = self._windows(pictures, self.strides, self.counts)
        flat = tf.reshape(upstream, [_count_of([self.batch, *self.counts]), self.groups, self.kernel[-1]])
        result = self._sum("nacb,ncd->abcd", windows, flat)
        return tf.reshape(result, [*self.places, self.kernel[1], self.groups * self.kernel[-1]])

    def _windows(
        self, pictures: tf.Tensor, strides: Sequence[int], counts: Sequence[Any], backwards: bool = False
    ) -> tf.Tensor:
        """What each place of the kernel meets: [positions of all pictures, places, groups, channels of a group].

        Backwards, the last place of the kernel meets what is first.
        """
        seen = []
        for place in itertools.product(*map(range, self.places)):
            cuts = [slice(None)]
            for at, n, step, stride, count in zip(place, self.places, self.dilation, strides, counts, strict=True):
                begin = (n - 1 - at if backwards else at) * step
                cuts.append(slice(begin, begin + _positive((count - 1) * stride + 1), stride))
            seen.append(pictures[tuple(cuts)])
        windows = tf.stack(seen, axis=-2)
        *positions, places, channels = _sizes_of(windows)
        return tf.reshape(windows, [_count_of(positions), places, self.groups, channels // self.groups])


def _spread(values: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Values with stride - 1 zeros between neighbours along each spatial axis."""
    for axis, stride in enumerate(strides, start=1):
        if stride > 1:
            sizes = _sizes_of(values)
            none = [[0, 0]]
            behind = [*none * (axis + 1), [0, stride - 1], *none * (len(sizes) - axis - 1)]
            wide = tf.pad(tf.expand_dims(values, axis + 1), behind)
            wide = tf.reshape(wide, [*sizes[:axis], sizes[axis] * stride, *sizes[axis + 1 :]])
            cuts = [slice(None)] * axis + [slice(0, _positive((sizes[axis] - 1) * stride + 1))]
            values = wide[tuple(cuts)]
    return values
