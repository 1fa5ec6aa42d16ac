"""Convolutions as products of windows and kernels, so that an accumulator can sum them.

y sums over the places of the kernel, row by row, and the channels at each; dx over the same places and the kernel's
outputs at each; dw over batch and positions. A place outside of the picture counts as a 0, and in dx one from which no
output comes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.formats.accumulators import Accumulator, contract, count_of, sizes_of
from scaler.formats.bilinear import Convolution


def convolve(convolution: Convolution, pictures: tf.Tensor, kernel: tf.Tensor, accumulator: Accumulator) -> tf.Tensor:
    """A convolution, whose three products sum in an accumulator.

    The gradients of its gradients add up overlapping windows in float32.

    Args:
        convolution: Its strides, padding, dilation and data format.
        pictures: Float32.
        kernel: Float32, of known shape. With fewer channels than the pictures, they are in groups.
        accumulator: How it sums.
    """
    rank = len(convolution.strides)
    first = convolution.data_format == "channels_first"
    if first:
        pictures = tf.transpose(pictures, [0, *range(2, rank + 2), 1])
    if convolution.padding == "same":
        pictures = _padded(pictures, kernel, convolution)
    result = _valid(pictures, kernel, _geometry(pictures, kernel, convolution), accumulator)
    return tf.transpose(result, [0, rank + 1, *range(1, rank + 1)]) if first else result


class _Geometry(NamedTuple):
    """A convolution without padding. Sizes are numbers where they are known, and scalars elsewhere.

    Attributes:
        places: Of the kernel, by spatial axis.
        strides: By spatial axis.
        dilation: By spatial axis.
        groups: Of channels.
        kernel: The kernel of each group: [places, channels, groups, outputs of a group].
        batch: The number of pictures.
        sizes: Of a picture, by spatial axis.
        counts: How many positions a window has, by spatial axis.
    """

    places: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kernel: tuple[int, int, int, int]
    batch: Any
    sizes: list
    counts: list


def _geometry(pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution) -> _Geometry:
    *places, channels, outputs = kernel.shape
    batch, *sizes, every = sizes_of(pictures)
    groups = every // channels
    axes = zip(sizes, places, convolution.strides, convolution.dilation, strict=True)
    counts = [_positive((size - (n - 1) * step - 1) // stride + 1) for size, n, stride, step in axes]
    by_group = (math.prod(places), channels, groups, outputs // groups)
    return _Geometry(tuple(places), convolution.strides, convolution.dilation, groups, by_group, batch, sizes, counts)


def _padded(pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution) -> tf.Tensor:
    """With zeros around, so that there is a position for each stride that begins in a picture: more of them behind."""
    around = []
    sizes = sizes_of(pictures)[1:-1]
    for size, n, stride, step in zip(sizes, kernel.shape[:-2], convolution.strides, convolution.dilation, strict=True):
        missing = _positive((-(-size // stride) - 1) * stride + (n - 1) * step + 1 - size)
        around.append([missing // 2, missing - missing // 2])
    return tf.pad(pictures, [[0, 0], *around, [0, 0]])


def _valid(pictures: tf.Tensor, kernel: tf.Tensor, known: _Geometry, accumulator: Accumulator) -> tf.Tensor:
    """A convolution of pictures with their channels last, without padding."""

    @tf.custom_gradient
    def of_operands(pictures: tf.Tensor, kernel: tf.Tensor) -> tuple:
        def gradients(upstream: tf.Tensor) -> tuple:
            return (
                _of_pictures(upstream, kernel, known, accumulator),
                _of_kernel(pictures, upstream, known, accumulator),
            )

        windows = _by_group(_windows(pictures, known, known.strides, known.counts), known.groups)
        result = contract("nagb,abgc->ngc", windows, tf.reshape(kernel, known.kernel), accumulator)
        return tf.reshape(result, [known.batch, *known.counts, kernel.shape[-1]]), gradients

    return of_operands(pictures, kernel)


def _of_pictures(upstream: tf.Tensor, kernel: tf.Tensor, known: _Geometry, accumulator: Accumulator) -> tf.Tensor:
    """The gradient of the pictures: a convolution of the outputs' gradient, backwards, at each pixel."""
    spread = _spread(upstream, known.strides)
    reach = [(n - 1) * step for n, step in zip(known.places, known.dilation, strict=True)]
    covered = [size + more for size, more in zip(sizes_of(spread)[1:-1], reach, strict=True)]
    spread = tf.pad(spread, [[0, 0], *([more, more] for more in reach), [0, 0]])
    windows = _by_group(_windows(spread, known, (1,) * len(covered), covered, backwards=True), known.groups)
    result = contract("nagb,acgb->ngc", windows, tf.reshape(kernel, known.kernel), accumulator)
    result = tf.reshape(result, [known.batch, *covered, known.kernel[1] * known.groups])
    # Behind the last window there may be pixels that none reaches.
    rest = [[0, size - reached] for size, reached in zip(known.sizes, covered, strict=True)]
    return tf.pad(result, [[0, 0], *rest, [0, 0]])


def _of_kernel(pictures: tf.Tensor, upstream: tf.Tensor, known: _Geometry, accumulator: Accumulator) -> tf.Tensor:
    """The gradient of the kernel."""
    windows = _by_group(_windows(pictures, known, known.strides, known.counts), known.groups)
    outputs = known.kernel[-1]
    flat = tf.reshape(upstream, [count_of([known.batch, *known.counts]), known.groups, outputs])
    result = contract("nacb,ncd->abcd", windows, flat, accumulator)
    return tf.reshape(result, [*known.places, known.kernel[1], known.groups * outputs])


def _windows(
    pictures: tf.Tensor, known: _Geometry, strides: Sequence[int], counts: Sequence[Any], backwards: bool = False
) -> tf.Tensor:
    """What each place of the kernel meets at each position: [batch, *counts, places, channels].

    Args:
        pictures: With channels last.
        known: Places and dilation.
        strides: Between positions, by axis.
        counts: The number of positions, by axis.
        backwards: Whether the last place of the kernel meets what is first.
    """
    seen = []
    for place in itertools.product(*map(range, known.places)):
        cuts = [slice(None)]
        for at, n, step, stride, count in zip(place, known.places, known.dilation, strides, counts, strict=True):
            begin = (n - 1 - at if backwards else at) * step
            cuts.append(slice(begin, begin + _positive((count - 1) * stride + 1), stride))
        seen.append(pictures[tuple(cuts)])
    return tf.stack(seen, axis=-2)


def _spread(values: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Values with stride - 1 zeros between neighbours along each spatial axis."""
    for axis, stride in enumerate(strides, start=1):
        if stride > 1:
            sizes = sizes_of(values)
            none = [[0, 0]]
            behind = [*none * (axis + 1), [0, stride - 1], *none * (len(sizes) - axis - 1)]
            wide = tf.pad(tf.expand_dims(values, axis + 1), behind)
            wide = tf.reshape(wide, [*sizes[:axis], sizes[axis] * stride, *sizes[axis + 1 :]])
            cuts = [slice(None)] * axis + [slice(0, _positive((sizes[axis] - 1) * stride + 1))]
            values = wide[tuple(cuts)]
    return values


def _by_group(windows: tf.Tensor, groups: int) -> tf.Tensor:
    """Windows as [positions of all pictures, places, groups, channels of a group]."""
    *positions, places, channels = sizes_of(windows)
    return tf.reshape(windows, [count_of(positions), places, groups, channels // groups])


def _positive(size: Any) -> Any:
    """At least 0."""
    return tf.maximum(size, 0) if tf.is_tensor(size) else max(size, 0)
