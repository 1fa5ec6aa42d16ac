"""How many values there are of each exponent, counted in the graph from their bits: one bin for each, the rest apart.

    index   0        1 ... 277           278        279
    holds   zero     2^-149 ... 2^127    infinity   NaN

The bin of the exponent e holds the magnitudes in [2^e, 2^(e+1)). The subnormals of float32 and bfloat16 lie in the
bins up to -127, those of float16 in the bins -24 to -15: each in bins of their own.

Arithmetic on some machines takes subnormals for zero, so nothing here computes with the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import bits, graphs
from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import has_gpu, in_xla, traced_once
from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient, values_of

LOWEST = -149
"""The exponent of float32's smallest subnormal number."""
HIGHEST = 127
"""The exponent of float32's largest number."""
ZERO = 0
"""The index of zeros of either sign."""
INFINITY = HIGHEST - LOWEST + 2
"""The index of infinities of either sign."""
NAN = INFINITY + 1
"""The index of NaN."""
BINS = NAN + 1
"""How many bins there are."""
_INFINITY_BITS = 0x7F800000
_FIRST_NORMAL = 0x00800000
_FIELDS = 256
"""Values of the 8 bits in which float32 and bfloat16 keep the exponent; 0 is zero or subnormal, 255 is not finite."""
_SUBNORMAL_BINS = -126 - LOWEST
DTYPES = (tf.float16, tf.bfloat16, tf.float32)


def bin_of(exponent: int) -> int:
    """The index of the bin that holds [2^exponent, 2^(exponent + 1)), for an exponent from LOWEST to HIGHEST."""
    return exponent - LOWEST + 1


@no_autograph
def exponents(tensors: Gradient | Sequence[Gradient]) -> tf.Tensor:
    """Counts the values by `floor(log2(abs(x)))`, exactly, with zero, infinity and NaN apart.

    Counts of other steps, micro-batches, tensors or replicas are joined by addition.

    Args:
        tensors: A float16, bfloat16 or float32 tensor of any shape, a `tf.IndexedSlices`, or a sequence of them with
            None among them. Duplicate indices of a `tf.IndexedSlices` count one by one.

    Returns:
        Int64 [280]: zeros; the exponents -149 to 127; infinities; NaN. `bin_of` gives the index of an exponent.

    Raises:
        InvalidArgument: For another dtype, and for what is no tensor.
    """
    return counts_and_largest([tensors if isinstance(tensors, (list, tuple)) else [tensors]])[0][0]


def counts_and_largest(rows: Sequence[Sequence[Gradient]]) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts each of several lists of tensors, in one look: what opens a second one in any of them does so in all.

    Args:
        rows: At least one list of what `exponents` takes.

    Returns:
        Int64 [rows, 280], and float32 [rows], the largest magnitudes: NaN if there is one, 0 without values.
    """
    values = [flat_values(row) for row in rows]
    # XLA joins the operations on a value into one loop, so that the exact way costs little more there. On a GPU the
    # second look would wait for the first.
    at_once = in_xla() or has_gpu() or not any(values)
    return _exact(values) if at_once else _fast_where_possible(values)


def flat_values(tensors: Sequence[Gradient]) -> list[tf.Tensor]:
    """The numbers in each of the tensors that is not None, as a vector of its dtype.

    Raises:
        InvalidArgument: For a dtype that is not counted.
    """
    return [tf.reshape(_known(values_of(entry)), [-1]) for entry in tensors if entry is not None]


def _known(values: tf.types.experimental.TensorLike) -> tf.Tensor:
    try:
        values = tf.convert_to_tensor(values)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"a {type(values).__name__} where a tensor should be: expected a tensor, a tf.IndexedSlices, or a list of "
            "them."
        ) from None
    if values.dtype not in DTYPES:
        raise InvalidArgument(
            f"a tensor of dtype {values.dtype.name}: expected float16, bfloat16 or float32; cast it first."
        )
    return values


def _fast_where_possible(rows: list[list[tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts the 8 bits of the exponent, and looks again only where 0 and 255 leave something open."""
    counts = tf.stack(
        [_sum([_count(_sign_and_field(value), 2 * _FIELDS) for value in row], 2 * _FIELDS) for row in rows]
    )
    fields = tf.reduce_sum(tf.reshape(counts, [-1, 2, _FIELDS]), axis=1)
    nothing = tf.zeros([len(rows), BINS], tf.int64)
    fast = tf.concat([fields[:, :1], nothing[:, :_SUBNORMAL_BINS], fields[:, 1:], nothing[:, :1]], axis=1)
    # Arithmetic is exact for what is neither subnormal nor NaN, and two reductions read less than their bits.
    largest = tf.stack([_largest(row) for row in rows])
    # Float16 has no number that is subnormal in float32.
    wide = [number for number, row in enumerate(rows) if any(value.dtype != tf.float16 for value in row)]
    zeros = tf.gather(fields[:, 0], wide) > 0 if wide else tf.zeros([0], tf.bool)
    some_subnormal = tf.cond(
        tf.reduce_any(zeros),
        lambda: graphs.call_noninlined(lambda: _any_subnormal([rows[number] for number in wide], zeros)),
        lambda: False,
    )
    again = tf.logical_or(tf.reduce_any(fields[:, -1] > 0), some_subnormal)
    return tf.cond(again, lambda: graphs.call_noninlined(lambda: _exact(rows)), lambda: (fast, largest))


def _largest(row: list[tf.Tensor]) -> tf.Tensor:
    """The largest magnitude of values without NaN, infinities and subnormal numbers; 0 without any."""
    wide = [tf.cast(value, tf.float32) for value in row]
    ends = [end for value in wide for end in (tf.reduce_max(value), -tf.reduce_min(value))]
    return tf.abs(tf.reduce_max(tf.stack([tf.constant(0.0), *ends])))  # Of zeros the least, turned round, is -0.


def _sign_and_field(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.bfloat16:
        return tf.cast(tf.bitwise.right_shift(tf.bitcast(values, tf.uint16), tf.constant(7, tf.uint16)), tf.int32)
    pattern = tf.bitcast(tf.cast(values, tf.float32), tf.uint32)
    return tf.bitcast(tf.bitwise.right_shift(pattern, tf.constant(23, tf.uint32)), tf.int32)


def _any_subnormal(rows: list[list[tf.Tensor]], look: tf.Tensor) -> tf.Tensor:
    """Whether there is a float32 or bfloat16 subnormal in the rows to look at, bool [rows]."""
    places = [place for place, row in enumerate(rows) for value in row if value.dtype != tf.float16]
    wide = [value for row in rows for value in row if value.dtype != tf.float16]
    # Nothing is read of the other rows.
    ends = tf.unstack(tf.where(look, tf.int32.max, 0), num=len(rows))
    parts = [value[: ends[place]] for place, value in zip(places, wide, strict=True)]
    # The sum takes 0 to the greatest integer and 1, 2, 3, ... to the least ones.
    least = [tf.reduce_min(magnitude_bits(part) + bits.MAGNITUDE) for part in parts]
    return tf.reduce_min(tf.stack(least)) < _FIRST_NORMAL - 1 + tf.int32.min


def _exact(rows: list[list[tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
    magnitudes = [list(map(magnitude_bits, row)) for row in rows]
    counts = tf.stack([_sum(list(map(_count_bins, row)), BINS) for row in magnitudes])
    return counts, bits.as_float(tf.stack(list(map(bits.largest, magnitudes))))


def _sum(counts: list[tf.Tensor], size: int) -> tf.Tensor:
    return tf.add_n(counts) if counts else tf.zeros([size], tf.int64)


def magnitude_bits(values: tf.Tensor) -> tf.Tensor:
    """The bits of |x| in float32, as `bits.magnitude_bits` gives them."""
    if values.dtype == tf.bfloat16:
        pattern = tf.cast(tf.bitcast(values, tf.uint16), bits.kind())
        return tf.bitwise.left_shift(tf.bitwise.bitwise_and(pattern, bits.constant(0x7FFF)), bits.constant(16))
    # Float16 has no number that is subnormal in float32, so this cast flushes nothing.
    return bits.magnitude_bits(tf.cast(values, tf.float32))


def _count_bins(magnitude: tf.Tensor) -> tf.Tensor:
    index = tf.cast(_bin(magnitude), tf.int32)
    if in_xla() or not has_gpu():
        return _count(index, BINS)
    # Of ones of its own TensorFlow would make a constant, which for int32 lies in the host's memory.
    ones = tf.cast(magnitude <= bits.constant(bits.MAGNITUDE), tf.int32)
    return tf.cast(tf.math.unsorted_segment_sum(ones, index, BINS), tf.int64)


def _bin(magnitude: tf.Tensor) -> tf.Tensor:
    normal = _field(magnitude) + bits.constant(_SUBNORMAL_BINS)
    # A subnormal is its bits times 2^-149, and an integer below 2^24 keeps its logarithm as a float.
    as_float = tf.bitcast(tf.cast(magnitude, tf.float32), bits.kind())
    subnormal = tf.maximum(_field(as_float), bits.constant(126)) - bits.constant(126)
    finite = tf.where(magnitude < bits.constant(_FIRST_NORMAL), subnormal, normal)
    return tf.where(magnitude > bits.constant(_INFINITY_BITS), bits.constant(NAN), finite)


def _field(magnitude: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(magnitude, bits.constant(23))


def _count(indices: tf.Tensor, size: int) -> tf.Tensor:
    # Its GPU kernel takes no int64 weights, and refuses to run where operations have to be deterministic.
    return tf.raw_ops.DenseBincount(input=indices, size=size, weights=tf.constant([], tf.int64))


class Measured(NamedTuple):
    """What was measured, in the order of the rows.

    Attributes:
        counts: Int64 [rows, 280], as `exponents` counts.
        amax: Float32 [rows], the largest magnitude: infinity if there is one, NaN if there is one, 0 without values.
    """

    counts: tf.Tensor
    amax: tf.Tensor


def measured(rows: Mapping[str, Sequence[Gradient]], when: tf.Tensor | None = None) -> Measured:
    """Counts and largest magnitudes.

    Args:
        rows: For each row the tensors that are counted together, of the kinds that `exponents` takes.
        when: Scalar bool, whether to measure; where it is false, all of it is 0. Always, if not given.

    Raises:
        InvalidArgument: For what is no such mapping, and for a tensor of another dtype.
    """
    if not isinstance(rows, Mapping) or not all(isinstance(row, (list, tuple)) for row in rows.values()):
        raise InvalidArgument(
            f"measured(rows of type {type(rows).__name__}): expected a dict with a list of tensors for each row, such "
            "as collection.rows()."
        )
    if not rows:
        return Measured(tf.zeros([0, BINS], tf.int64), tf.zeros([0]))
    return if_due(when, lambda: Measured(*counts_and_largest(list(rows.values()))))


def swallowed_share(weights: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
    """The share of the updates other than 0 for which w + dw == w in the dtype of w, scalar float32; 0 without any.

    Args:
        weights: Float16, bfloat16 or float32, of any shape.
        updates: Float32, of that shape.
    """
    wanted = tf.not_equal(updates, tf.zeros_like(updates))
    after = tf.saturate_cast(tf.cast(weights, tf.float32) + updates, weights.dtype)
    # Of bits: XLA may leave out a cast to 16 bits whose result is compared in float32.
    lost = tf.logical_and(wanted, tf.equal(_bits(after), _bits(weights)))
    count = tf.maximum(tf.math.count_nonzero(wanted), tf.constant(1, tf.int64))
    return tf.cast(tf.math.count_nonzero(lost), tf.float32) / tf.cast(count, tf.float32)


def _bits(values: tf.Tensor) -> tf.Tensor:
    pattern = tf.bitcast(values, tf.uint32 if values.dtype == tf.float32 else tf.uint16)
    negative_zero = tf.constant(1 << (8 * pattern.dtype.size - 1), pattern.dtype)
    return tf.where(tf.equal(pattern, negative_zero), tf.constant(0, pattern.dtype), pattern)


@no_autograph
def if_due(due: tf.Tensor | None, measure: Callable[[], Any], fill: float | Mapping[str, float] | None = 0.0) -> Any:
    """What a function measures at a step that is to be measured, and a number in its place at others.

    Operations that the function adds run only at a step that is due, in a graph: in eager mode it is always called.

    Args:
        due: Scalar bool, whether the step is to be measured; None for always.
        measure: Returns tensors in any structure.
        fill: All values at other steps. For a dict of tensors also a dict, and NaN for what it lacks. With None there
            are no values: the tensors are empty. XLA, which needs their shapes, has zeros in their place.
    """
    if due is None:
        return measure()

    def others(like: Any) -> Any:
        if isinstance(fill, Mapping):
            return {name: _filled(one, fill.get(name, float("nan"))) for name, one in like.items()}
        return tf.nest.map_structure(lambda one: _filled(one, fill), like)

    if tf.executing_eagerly():
        found = measure()
        return found if due else others(found)
    seen: list[Any] = []

    def measured() -> Any:
        # TensorFlow visits the operations of a branch that is not taken, unless they stand in a function of their own.
        found = traced_once(measure)()
        # Traced first: what it is like is known once the other branch is traced.
        seen.append(tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), found))
        return found

    return tf.cond(due, measured, lambda: others(seen[-1]))


def _filled(like: Any, fill: float | None) -> tf.Tensor:
    if fill is None:
        return tf.zeros(like.shape if in_xla() else [0], like.dtype)
    return tf.fill(like.shape, tf.constant(like.dtype.as_numpy_dtype(fill)))
