"""Convolutions as products of windows and kernels, so that an accumulator can sum them.

y sums over the places of the kernel, row by row, and the channels at each; dx over the same places and the kernel's
outputs at each; dw over batch and positions. A place outside of the picture counts as a 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

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
    result = _valid(pictures, kernel, convolution, accumulator)
    return tf.transpose(result, [0, rank + 1, *range(1, rank + 1)]) if first else result


def _padded(pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution) -> tf.Tensor:
    """With as many zeros as there is one position for each stride, more of them at the end."""
    sides = []
    for size, places, stride, dilation in _axes(pictures, kernel, convolution):
        missing = _positive((-(-size // stride) - 1) * stride + (places - 1) * dilation + 1 - size)
        sides.append([missing // 2, missing - missing // 2])
    return tf.pad(pictures, [[0, 0], *sides, [0, 0]])


def _valid(pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution, accumulator: Accumulator) -> tf.Tensor:
    """The same of pictures with their channels last, without padding."""
    *places, channels, outputs = kernel.shape
    groups = pictures.shape[-1] // channels
    strides, dilation = convolution.strides, convolution.dilation
    # The kernel of each group: [places, channels, groups, outputs of a group].
    by_group = [math.prod(places), channels, groups, outputs // groups]
    batch, *sizes, _ = sizes_of(pictures)
    counts = [
        _positive((size - (n - 1) * spread - 1) // stride + 1)
        for size, n, stride, spread in _axes(pictures, kernel, convolution)
    ]

    @tf.custom_gradient
    def of_operands(pictures: tf.Tensor, kernel: tf.Tensor) -> tuple:
        def gradients(upstream: tf.Tensor) -> tuple:
            spread = _spread(upstream, strides)
            around = [[(n - 1) * step] * 2 for n, step in zip(places, dilation, strict=True)]
            spread = tf.pad(spread, [[0, 0], *around, [0, 0]])
            covered = [
                _positive((count - 1) * stride + 1) + (n - 1) * step
                for count, stride, n, step in zip(counts, strides, places, dilation, strict=True)
            ]
            seen = _windows(spread, places, dilation, [1] * len(places), covered, backwards=True)
            of_pictures = contract("nagb,acgb->ngc", _by_group(seen, groups), tf.reshape(kernel, by_group), accumulator)
            of_pictures = tf.reshape(of_pictures, [batch, *covered, groups * channels])
            # What no window reaches, at the end.
            rest = [[0, size - reached] for size, reached in zip(sizes, covered, strict=True)]
            of_pictures = tf.pad(of_pictures, [[0, 0], *rest, [0, 0]])
            windows = _windows(pictures, places, dilation, strides, counts)
            flat = tf.reshape(upstream, [count_of([batch, *counts]), groups, outputs // groups])
            of_kernel = contract("nagc,ngb->acgb", _by_group(windows, groups), flat, accumulator)
            return of_pictures, tf.reshape(of_kernel, kernel.shape)

        windows = _by_group(_windows(pictures, places, dilation, strides, counts), groups)
        result = contract("nagb,abgc->ngc", windows, tf.reshape(kernel, by_group), accumulator)
        return tf.reshape(result, [batch, *counts, outputs]), gradients

    return of_operands(pictures, kernel)


def _axes(pictures: tf.Tensor, kernel: tf.Tensor, convolution: Convolution) -> list[tuple]:
    """Of each spatial axis: its size, the places of the kernel, the stride and the dilation."""
    sizes = sizes_of(pictures)[1:-1]
    return list(zip(sizes, kernel.shape[:-2], convolution.strides, convolution.dilation, strict=True))


def _windows(
    pictures: tf.Tensor,
    places: Sequence[int],
    dilation: Sequence[int],
    strides: Sequence[int],
    counts: Sequence[Any],
    backwards: bool = False,
) -> tf.Tensor:
    """What each place of the kernel meets at each position: [batch, *counts, places, channels].

    Args:
        pictures: With channels last.
        places: Of the kernel, by axis.
        dilation: By axis.
        strides: By axis.
        counts: The number of positions by axis.
        backwards: Whether the last place of the kernel meets what is first.
    """
    seen = []
    for place in itertools.product(*map(range, places)):
        cuts = []
        for at, n, step, stride, count in zip(place, places, dilation, strides, counts, strict=True):
            begin = (n - 1 - at if backwards else at) * step
            cuts.append(slice(begin, begin + _positive((count - 1) * stride + 1), stride))
        seen.append(pictures[(slice(None), *cuts)])
    return tf.stack(seen, axis=-2)


def _spread(values: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Values with stride - 1 zeros between neighbours along each spatial axis."""
    for axis, stride in enumerate(strides, start=1):
        if stride > 1:
            sizes = sizes_of(values)
            behind = [[0, 0]] * (values.shape.rank - axis - 1)
            wide = tf.pad(tf.expand_dims(values, axis + 1), [[0, 0]] * (axis + 1) + [[0, stride - 1]] + behind)
            wide = tf.reshape(wide, [*sizes[:axis], sizes[axis] * stride, *sizes[axis + 1 :]])
            values = wide[(slice(None),) * axis + (slice(0, _positive((sizes[axis] - 1) * stride + 1)),)]
    return values


def _by_group(windows: tf.Tensor, groups: int) -> tf.Tensor:
    """Windows as [positions of all pictures, places, groups, channels of a group]."""
    *positions, places, channels = sizes_of(windows)
    return tf.reshape(windows, [count_of(positions), places, groups, channels // groups])


def _positive(size: Any) -> Any:
    """At least 0."""
    return tf.maximum(size, 0) if tf.is_tensor(size) else max(size, 0)
