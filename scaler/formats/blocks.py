"""Blocks of values that share a scale: the MX formats and NVFP4.

OCP Microscaling Formats (MX) Specification 1.0, and Rouhani et al. 2023, Microscaling Data Formats for Deep Learning
(https://arxiv.org/abs/2310.10537), algorithm 1. NVFP4: NVIDIA 2025, Pretraining Large Language Models with NVFP4
(https://arxiv.org/abs/2509.25149), appendix on quantization.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler.backend import bits
from scaler.formats.elements import ELEMENTS, Element
from scaler.formats.rounding import round_float32
from scaler.formats.scales import LARGEST_SCALE, amax_of, current_scale


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format of blocks.

    Attributes:
        name: As `emulated` takes it.
        element: The format of the values.
        size: How many share a scale.
        scale: The format of the scales, "e8m0" or "float8_e4m3fn".
    """

    name: str
    element: Element
    size: int
    scale: str


BLOCK_FORMATS = {
    name: BlockFormat(name, ELEMENTS[element], size, scale)
    for name, element, size, scale in (
        ("mxfp8_e4m3", "float8_e4m3fn", 32, "e8m0"),
        ("mxfp8_e5m2", "float8_e5m2", 32, "e8m0"),
        ("mxfp6_e2m3", "float6_e2m3fn", 32, "e8m0"),
        ("mxfp6_e3m2", "float6_e3m2fn", 32, "e8m0"),
        ("mxfp4", "float4_e2m1fn", 32, "e8m0"),
        ("nvfp4", "float4_e2m1fn", 16, "float8_e4m3fn"),
    )
}
"""Every format of blocks by its name."""


def in_blocks(values: tf.Tensor, known: BlockFormat, axes: Sequence[int], seed: tf.Tensor | None = None) -> tf.Tensor:
    """Values as blocks of a format hold them.

    A block with a value that is not finite is NaN as a whole, as one whose scale is NaN.

    Args:
        values: Float32, of known rank.
        known: The format.
        axes: Those along which the blocks lie, as if flattened in this order. The last block may be shorter.
        seed: Integers [2], by which it rounds at random; None rounds to nearest.
    """
    if known.scale == "e8m0":
        return _along(values, axes, known.size, lambda blocks: _mx(blocks, known.element, seed))
    encode = current_scale(amax_of(values), known.element.largest * ELEMENTS[known.scale].largest)
    return _along(values, axes, known.size, lambda blocks: _nvfp4(blocks, known, encode, seed))


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


def _nvfp4(blocks: tf.Tensor, known: BlockFormat, encode: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
    """Blocks [..., count, size] at scales in E4M3, which the tensor's scale brings into its range."""
    amax = _block_amax(blocks)
    decode = 1.0 / encode
    stored = round_float32((amax / known.element.largest) * encode, ELEMENTS[known.scale], True)
    scale = stored * decode
    # Of a scale that is flushed to zero the block is zero.
    result = round_float32(blocks * tf.minimum(1.0 / scale, LARGEST_SCALE), known.element, True, seed) * scale
    return tf.where(tf.math.is_finite(amax), result, tf.constant(math.nan))


def _block_amax(blocks: tf.Tensor) -> tf.Tensor:
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
