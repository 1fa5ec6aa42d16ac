"""Finds the matrix products and casts of a step: their dtypes, sides that are not multiples of 8, the cost of casts."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from loops.diagnose.doctor.timing import PairedTiming, Spread, time_interleaved
from loops.diagnose.graph.calls import Traced
from loops.diagnose.graph.census import Census
from loops.diagnose.graph.operations import CONVOLUTIONS, MATRICES, needed


@dataclasses.dataclass(frozen=True)
class Casts:
    """The casts of a step.

    Attributes:
        count: The number of casts.
        bytes: The bytes that they write.
        milliseconds: The time for casts of as many bytes on this machine, one after the other with nothing else
            running, without the time of as many calls that cast a single value.
    """

    count: int
    bytes: int
    milliseconds: Spread


def casts_of(census: Census, seconds: float) -> Casts | None:
    """Times the casts between float formats; None for a step without any.

    In the step they may take less time: the graph optimizer fuses some, and others run in parallel.
    """
    rows = [row for row in census.rows if row.cast_bytes]
    if not rows:
        return None
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.dtype] = sizes.get(row.dtype, 0) + (row.cast_bytes or 0)
    turns = time_interleaved(_casting(dict.fromkeys(sizes, 1)), _casting(sizes), seconds)
    calls, whole = turns.before.median, turns.after
    spread = Spread(*(max(0.0, value - calls) for value in (whole.median, whole.low, whole.high)))
    return Casts(sum(row.count for row in rows), sum(sizes.values()), spread)


def _casting(sizes: dict[str, int]) -> Callable[[], None]:
    """A function that casts, with so many bytes of output for each pair of dtypes, such as "float32 to float16"."""
    given = []
    for pair, size in sizes.items():
        source, target = (tf.as_dtype(name) for name in pair.split(" to "))
        given.append((tf.zeros([max(1, size // target.size)], source), target))

    def cast() -> None:
        for values, target in given:
            tf.cast(values, target)
        tf.test.experimental.sync_devices()

    return cast


_MULTIPLE = 8
_OF_INPUTS = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_OF_FILTERS = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")


@dataclasses.dataclass(frozen=True)
class Product:
    """One operation that multiplies.

    Attributes:
        layer: The name of its layer, or None.
        op: The type, such as "MatMul".
        dtype: The dtype in which it multiplies.
        multiplications: The number of multiplications.
        sides: For a `MatMul` the rows of the left matrix, the inner side, and the columns of the right; else ().
    """

    layer: str | None
    op: str
    dtype: str
    multiplications: int
    sides: tuple[int, ...]

    @property
    def odd(self) -> list[int]:
        """The sides of the right matrix that are not multiples of 8."""
        return [side for side in self.sides[1:] if side % _MULTIPLE]


@dataclasses.dataclass(frozen=True)
class Padded:
    """The largest product with a side that is not a multiple of 8, timed as it is and with its sides rounded up.

    Attributes:
        layer: The name of its layer, or None.
        dtype: The dtype in which it multiplies.
        sides: The sides as they are.
        rounded: The sides rounded up.
        turns: The times of both.
    """

    layer: str | None
    dtype: str
    sides: tuple[int, ...]
    rounded: tuple[int, ...]
    turns: PairedTiming


def products_of(traced: Traced) -> list[Product]:
    """The products of a step, also of its backward pass, but not those inside loops and called functions."""
    found = []
    used = needed({one.op for one in traced.graph.outputs})
    for operation in (one for one in traced.graph.get_operations() if one in used):
        multiplications = _multiplications(operation)
        if multiplications:
            place = traced.place_of_node(operation.name)
            dtype, sides = operation.outputs[0].dtype.name, _sides(operation)
            found.append(Product(place, operation.type, dtype, multiplications, sides))
    return found


def shares(products: list[Product]) -> Mapping[str, float]:
    """The share of the multiplications, by dtype."""
    counted: collections.Counter[str] = collections.Counter()
    for product in products:
        counted[product.dtype] += product.multiplications
    return {dtype: count / counted.total() for dtype, count in counted.most_common()}


def padded(products: list[Product], seconds: float) -> Padded | None:
    """Times the largest product with a side that is not a multiple of 8; None if there is none."""
    odd = [product for product in products if product.odd]
    if not odd:
        return None
    largest = max(odd, key=lambda product: product.multiplications)
    rows, *sides = largest.sides
    rounded = (rows, *(-(-side // _MULTIPLE) * _MULTIPLE for side in sides))
    turns = time_interleaved(_product(largest.sides, largest.dtype), _product(rounded, largest.dtype), seconds)
    return Padded(largest.layer, largest.dtype, largest.sides, rounded, turns)


def _product(sides: tuple[int, ...], dtype: str) -> Callable[[], None]:
    rows, inner, columns = sides
    left = tf.cast(tf.random.stateless_normal((rows, inner), (0, 1)), dtype)
    right = tf.cast(tf.random.stateless_normal((inner, columns), (0, 2)), dtype)

    def multiply() -> None:
        tf.matmul(left, right)
        tf.test.experimental.sync_devices()

    return multiply


def _multiplications(operation: tf.Operation) -> int:
    if operation.type in MATRICES:
        left, out = operation.inputs[0].shape, operation.outputs[0].shape
        turned = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return _size(out) * ((left[-2] if turned else left[-1]) or 0) if left.rank else 0
    if operation.type in CONVOLUTIONS or operation.type in _OF_INPUTS:
        # Each value of the convolution's output is a sum over all sides of the filter but the last.
        result = operation.outputs[0] if operation.type in CONVOLUTIONS else operation.inputs[2]
        filters = operation.inputs[1].shape
        return _size(result.shape) * _size(filters[:-1])
    if operation.type in _OF_FILTERS:
        return _size(operation.inputs[2].shape) * _size(operation.outputs[0].shape[:-1])
    return 0


def _sides(operation: tf.Operation) -> tuple[int, ...]:
    if operation.type != "MatMul" or not _size(operation.outputs[0].shape):
        return ()
    left, (rows, columns) = operation.inputs[0].shape, operation.outputs[0].shape
    inner = left[-2] if operation.get_attr("transpose_a") else left[-1]
    return (rows, inner, columns) if inner else ()


def _size(shape: tf.TensorShape) -> int:
    return math.prod(shape) if shape.is_fully_defined() else 0
