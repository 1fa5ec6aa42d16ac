"""How a tensor is rounded to a format: value by value, at one scale, or in blocks that share a scale.

In TensorFlow operations that every device and XLA compute alike. Not casts there and back: XLA is allowed to leave out
such a pair (xla_allow_excess_precision), and with it the rounding.

OCP Microscaling Formats (MX) Specification 1.0, and Rouhani et al. 2023, Microscaling Data Formats for Deep Learning
(https://arxiv.org/abs/2310.10537), algorithm 1. NVFP4: NVIDIA 2025, Pretraining Large Language Models with NVFP4
(https://arxiv.org/abs/2509.25149), appendix on quantization.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from scaler.backend import bits
from scaler.backend.autograph import no_autograph
from scaler.backend.formats import ELEMENTS, Element
from scaler.checks import LARGEST_SCALE, check_flag
from scaler.errors import InvalidArgument

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_TAKEN = (tf.float16, tf.bfloat16, tf.float32)


@no_autograph
def rounded(
    values: tf.types.experimental.TensorLike,
    format: str,
    *,
    saturate: bool = False,
    seed: tf.Tensor | tuple[int, int] | None = None,
) -> tf.Tensor:
    """Each value as a narrower format holds it: rounded to nearest with ties to even, or at random.

    To nearest, the bits are those of a cast by `ml_dtypes`, subnormal numbers and -0.0 included. Only what is not
    finite differs, in formats that cannot hold it: it becomes NaN, so that a loss scaler sees it.

    At random a value between the neighbours a < x < b becomes the upper one with probability (x - a) / (b - a), to
    within 2^-24 (2^-16 in bfloat16), so that the mean is the value (Gupta et al. 2015,
    https://arxiv.org/abs/1502.02551).

    Args:
        values: Float16, bfloat16 or float32, of any shape.
        format: "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn" or
            "float4_e2m1fn".
        saturate: Whether a finite value that is too large becomes the largest one. Without it it becomes infinity, or
            NaN in float8_e4m3fn. The formats of 6 and 4 bits have neither, and always saturate.
        seed: Two integers, or an int32 or int64 tensor [2]: rounds at random. The same seed rounds the same way.

    Returns:
        A tensor of the dtype and shape of `values`. Gradients pass through it as they are.

    Raises:
        InvalidArgument: For another format or dtype.
    """
    known = [name for name in ELEMENTS if name != "float32"]
    if not isinstance(format, str) or format not in known:
        raise InvalidArgument(f"format {format!r}: expected one of {', '.join(known)}.")
    element = ELEMENTS[format]
    check_flag("saturate", saturate)
    values = tf.convert_to_tensor(values)
    if values.dtype not in _TAKEN:
        raise InvalidArgument(f"rounded(values): dtype {values.dtype.name}: expected float16, bfloat16 or float32.")

    @tf.custom_gradient
    def straight_through(values: tf.Tensor) -> tuple:
        wide = tf.cast(values, tf.float32)
        return tf.cast(round_float32(wide, element, saturate, seed), values.dtype), lambda upstream: upstream

    return straight_through(values)


def round_float32(
    values: tf.Tensor, element: Element, saturate: bool, seed: tf.Tensor | tuple[int, int] | None = None
) -> tf.Tensor:
    """The same of float32 values, without a gradient of its own."""
    magnitude = bits.magnitude_bits(values)
    sign = tf.bitwise.bitwise_xor(tf.bitcast(values, bits.kind()), magnitude)
    chances = None if seed is None else tf.random.stateless_uniform(tf.shape(values), seed)
    if element.least_exponent == -126:
        result = _cut(magnitude, 23 - element.fraction_bits, chances)
    else:
        result = _in_steps(bits.as_float(magnitude), element, chances)
    # Compared as patterns: comparisons of floats may take subnormal numbers for 0.
    largest = int(np.float32(element.largest).view(np.int32))
    beyond = {"infinity": _INFINITY, "nan": _NAN, "largest": largest}[element.beyond]
    limit, infinity = bits.constant(largest), bits.constant(_INFINITY)
    result = tf.where(result > limit, limit if saturate else bits.constant(beyond), result)
    held = magnitude if element.beyond == "infinity" else bits.constant(_NAN)
    result = tf.where(magnitude >= infinity, held, result)
    return tf.bitcast(tf.bitwise.bitwise_or(result, sign), tf.float32)


def _in_steps(magnitude: tf.Tensor, element: Element, chances: tf.Tensor | None) -> tf.Tensor:
    """Rounds to multiples of the distance between neighbours, a power of two: quotient and product are exact."""
    step = bits.spacing(magnitude, element.fraction_bits, element.least_exponent)
    quotient = magnitude / step
    if chances is None:
        whole = tf.round(quotient)
    else:
        below = tf.floor(quotient)
        whole = below + tf.cast(chances < quotient - below, tf.float32)
    return tf.bitcast(whole * step, bits.kind())


def _cut(magnitude: tf.Tensor, count: int, chances: tf.Tensor | None) -> tf.Tensor:
    """Rounds to float32's exponents with fewer bits: the lowest `count` of them go.

    Subnormal numbers included, which float32 arithmetic may take for 0.
    """
    if chances is None:
        odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(magnitude, bits.constant(count)), bits.constant(1))
        added = odd + bits.constant(2 ** (count - 1) - 1)
    else:
        added = tf.cast(tf.floor(chances * 2.0**count), bits.kind())
    return tf.bitwise.bitwise_and(magnitude + added, bits.constant(bits.MAGNITUDE - (2**count - 1)))


def seed_from(values: tf.Tensor, seed: int, role: int) -> tf.Tensor:
    """A seed that is another one for other values: int64 [2].

    Rounding at random needs other numbers at each step. Taken from the values themselves, they need no state that a
    checkpoint would have to hold, or that replicas would have to agree on.
    """
    pattern = tf.cast(tf.bitcast(tf.cast(values, tf.float32), tf.int32), tf.int64)
    return tf.stack([tf.constant(np.int64(seed * 4 + role)), tf.reduce_sum(pattern)])


class Layout(NamedTuple):
    """How a format holds a tensor.

    Attributes:
        element: The format of the values.
        scale: What the values are scaled by: "float32", one number for the tensor; "e8m0" or "float8_e4m3fn", in which
            each block has one; None for nothing.
        size: How many values share a scale, if there are blocks.
    """

    element: str
    scale: str | None = None
    size: int = 0


LAYOUTS = {
    "float32": Layout("float32"),
    "float16": Layout("float16"),
    "bfloat16": Layout("bfloat16"),
    "float8_e4m3fn": Layout("float8_e4m3fn", "float32"),
    "float8_e5m2": Layout("float8_e5m2", "float32"),
    "mxfp8_e4m3": Layout("float8_e4m3fn", "e8m0", 32),
    "mxfp8_e5m2": Layout("float8_e5m2", "e8m0", 32),
    "mxfp6_e2m3": Layout("float6_e2m3fn", "e8m0", 32),
    "mxfp6_e3m2": Layout("float6_e3m2fn", "e8m0", 32),
    "mxfp4": Layout("float4_e2m1fn", "e8m0", 32),
    "nvfp4": Layout("float4_e2m1fn", "float8_e4m3fn", 16),
}
"""Every format that `emulated` takes, by its name."""


@dataclasses.dataclass(frozen=True)
class TensorFormat:
    """What one of a product's three tensors is rounded to.

    Attributes:
        format: As `emulated` takes it.
        stochastic: Whether at random.
        seed: For that.
        role: A number for each of the three tensors, so that they draw other numbers.
    """

    format: str
    stochastic: bool
    seed: int
    role: int

    @property
    def in_blocks(self) -> bool:
        """Whether the result depends on the axes."""
        return LAYOUTS[self.format].size > 0

    @property
    def scaled(self) -> bool:
        """Whether there is a scale for the whole tensor, which may come from past steps."""
        return LAYOUTS[self.format].scale == "float32"

    def __call__(self, values: tf.Tensor, axes: Sequence[int], scale: tf.Tensor | None = None) -> tf.Tensor:
        """Rounds float32 values: at a scale, or at that of their own largest magnitude if none is given."""
        if self.format == "float32":
            return values
        seed = seed_from(values, self.seed, self.role) if self.stochastic else None
        if self.in_blocks:
            return in_blocks(values, self.format, axes, seed)
        element = ELEMENTS[self.format]
        if not self.scaled:
            return round_float32(values, element, False, seed)
        if scale is None:
            scale = _current_scale(amax_of(values), element.largest)
        return round_float32(values * scale, element, True, seed) * (1.0 / scale)


def amax_of(values: tf.Tensor) -> tf.Tensor:
    """The largest magnitude, scalar float32; infinity if there is a NaN, 0 of no values."""
    magnitude = tf.abs(values)
    magnitude = tf.where(tf.math.is_nan(magnitude), tf.constant(float("inf")), magnitude)
    return tf.reduce_max(tf.concat([tf.reshape(magnitude, [-1]), [0.0]], axis=0))


def _current_scale(amax: tf.Tensor, largest: float) -> tf.Tensor:
    """The scale at which `amax` becomes the largest value: 1 if it is 0 or infinite.

    `compute_scale_from_amax` in NVIDIA/TransformerEngine, transformer_engine/common/recipe/recipe_common.cuh, with a
    ceiling whose reciprocal is still a normal number.
    """
    usable = tf.logical_and(amax > 0.0, tf.math.is_finite(amax))
    return tf.where(usable, tf.minimum(largest / tf.where(usable, amax, 1.0), LARGEST_SCALE), 1.0)


def in_blocks(values: tf.Tensor, format: str, axes: Sequence[int], seed: tf.Tensor | None = None) -> tf.Tensor:
    """Values as blocks of a format hold them.

    A block with a value that is not finite is NaN as a whole, as one whose scale is NaN.

    Args:
        values: Float32, of known rank.
        format: One with blocks.
        axes: Those along which the blocks lie, as if flattened in this order. The last block may be shorter.
        seed: Integers [2], by which it rounds at random; None rounds to nearest.
    """
    name, kind, size = LAYOUTS[format]
    element = ELEMENTS[name]
    if kind == "e8m0":
        return _along(values, axes, size, lambda blocks: _mx(blocks, element, seed))
    of_scales = ELEMENTS[str(kind)]
    encode = _current_scale(amax_of(values), element.largest * of_scales.largest)
    return _along(values, axes, size, lambda blocks: _nvfp4(blocks, element, of_scales, encode, seed))


def _mx(blocks: tf.Tensor, element: Element, seed: tf.Tensor | None) -> tf.Tensor:
    """Blocks [..., count, size] at scales that are powers of two.

    The scale is the largest power of two at most the largest magnitude, over that of the element (section 6.3). What is
    then too large saturates.
    """
    amax = _block_amax(blocks)
    exponent = tf.bitwise.right_shift(bits.magnitude_bits(amax), bits.constant(23))
    # The scale's reciprocal: unlike the least scale, 2^-127, it is a normal number. Biased exponents of floats: an
    # infinity's makes the least one, and the block becomes NaN.
    reciprocal = tf.minimum(bits.constant(254 + element.largest_exponent) - exponent, bits.constant(254))
    factor = bits.as_float(tf.bitwise.left_shift(reciprocal, bits.constant(23)))
    result = round_float32(blocks * factor, element, True, seed) / factor
    return tf.where(tf.math.is_finite(amax), result, tf.constant(math.nan))


def _nvfp4(
    blocks: tf.Tensor, element: Element, of_scales: Element, encode: tf.Tensor, seed: tf.Tensor | None
) -> tf.Tensor:
    """Blocks [..., count, size] at scales in E4M3, which the tensor's scale brings into its range."""
    amax = _block_amax(blocks)
    scale = round_float32((amax / element.largest) * encode, of_scales, True) * (1.0 / encode)
    # Of a scale that is flushed to zero the block is zero.
    result = round_float32(blocks * tf.minimum(1.0 / scale, LARGEST_SCALE), element, True, seed) * scale
    return tf.where(tf.math.is_finite(amax), result, tf.constant(math.nan))


def _block_amax(blocks: tf.Tensor) -> tf.Tensor:
    """The largest magnitude of each block; infinity if there is a NaN."""
    magnitude = tf.abs(blocks)
    return tf.reduce_max(tf.where(tf.math.is_nan(magnitude), tf.constant(math.inf), magnitude), axis=-1, keepdims=True)


def _along(values: tf.Tensor, axes: Sequence[int], size: int, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Applies a function to blocks [rest, count, size] of some axes, and puts the result in the place of the values."""
    rank = values.shape.rank
    last = [axis % rank for axis in axes]
    order = [axis for axis in range(rank) if axis not in last] + last
    moved = values if order == list(range(rank)) else tf.transpose(values, order)
    shape = tf.shape(moved)
    length = tf.reduce_prod(shape[rank - len(last) :])
    rest = tf.reduce_prod(shape[: rank - len(last)])
    # Reshaped with -1, no values would be an error.
    rows = tf.reshape(moved, [rest, length])
    count = (length + size - 1) // size
    rows = tf.pad(rows, [[0, 0], [0, count * size - length]])
    blocks = change(tf.reshape(rows, [rest, count, size]))
    rows = tf.reshape(blocks, [rest, count * size])[:, :length]
    result = tf.reshape(rows, shape)
    if moved is not values:
        back = [order.index(axis) for axis in range(rank)]
        result = tf.transpose(result, back)
    return tf.ensure_shape(result, values.shape)
