"""Sums in a narrow accumulator in plain Python, one product after the other, and the products of layers by them.

A CPU takes numbers for 0 that are subnormal in float32, in what an addition gives as well as in what it is given.
"""

import itertools

import numpy as np
from format_cases import cast

ZERO = np.float32(0.0)


def normal(value):
    return ZERO if abs(value) < np.float32(2.0**-126) else value


def total(pairs, name, chunk):
    """The sum of the products of pairs of float32 numbers."""
    result = ZERO
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for first in range(0, len(pairs), chunk):
            part = ZERO
            for one, other in pairs[first : first + chunk]:
                part = normal(part + normal(np.float32(one) * np.float32(other)))
            result = cast(normal(normal(result) + part), name)[()]
    return result


def contracted(equation, left, right, name, chunk):
    """A product by an equation."""
    operands, result = equation.split("->")
    one, two = operands.split(",")
    sizes = {**dict(zip(one, left.shape, strict=True)), **dict(zip(two, right.shape, strict=True))}
    summed = sorted(set(one) & set(two) - set(result))
    found = np.zeros([sizes[label] for label in result], np.float32)
    for place in np.ndindex(found.shape):
        at = dict(zip(result, place, strict=True))
        pairs = []
        for terms in itertools.product(*(range(sizes[label]) for label in summed)):
            at |= zip(summed, terms, strict=True)
            pairs.append((left[tuple(at[label] for label in one)], right[tuple(at[label] for label in two)]))
        found[place] = total(pairs, name, chunk)
    return found


def products(equation, left, right, upstream, name, chunk):
    """A product, and the gradients of its operands for that of the product."""
    operands, result = equation.split("->")
    one, two = operands.split(",")
    return (
        contracted(equation, left, right, name, chunk),
        contracted(f"{result},{two}->{one}", upstream, right, name, chunk),
        contracted(f"{one},{result}->{two}", left, upstream, name, chunk),
    )


def convolved(pictures, kernel, upstream, strides, dilation, before, name, chunk):
    """The three products of a convolution of pictures [n, ..., c] with a kernel [..., c of a group, o].

    Args:
        before: How many zeros there are in front of a picture, by spatial axis. What is behind follows from the shape
            of `upstream`, the gradient of the outputs.
    """
    places = list(np.ndindex(kernel.shape[:-2]))
    channels, outputs = kernel.shape[-2:]
    in_group = outputs * channels // pictures.shape[-1]

    def seen(n, position, place, c):
        at = tuple(p * s + w * d - b for p, s, w, d, b in zip(position, strides, place, dilation, before, strict=True))
        inside = all(0 <= one < size for one, size in zip(at, pictures.shape[1:-1], strict=True))
        return pictures[(n, *at, c)] if inside else ZERO

    def behind(n, pixel, place, o):
        position = []
        for q, s, w, d, b, size in zip(pixel, strides, place, dilation, before, upstream.shape[1:-1], strict=True):
            p, rest = divmod(q + b - w * d, s)
            if rest or not 0 <= p < size:
                return ZERO
            position.append(p)
        return upstream[(n, *position, o)]

    value, of_pictures, of_kernel = (np.zeros(each.shape, np.float32) for each in (upstream, pictures, kernel))
    for n, *position, o in np.ndindex(value.shape):
        group = o // in_group * channels
        pairs = [
            (seen(n, position, place, group + c), kernel[(*place, c, o)]) for place in places for c in range(channels)
        ]
        value[(n, *position, o)] = total(pairs, name, chunk)
    for n, *pixel, c in np.ndindex(of_pictures.shape):
        first = c // channels * in_group
        pairs = [
            (behind(n, pixel, place, first + o), kernel[(*place, c % channels, first + o)])
            for place in places
            for o in range(in_group)
        ]
        of_pictures[(n, *pixel, c)] = total(pairs, name, chunk)
    for *place, c, o in np.ndindex(of_kernel.shape):
        channel = o // in_group * channels + c
        pairs = [
            (seen(n, position, place, channel), upstream[(n, *position, o)])
            for n, *position in np.ndindex(upstream.shape[:-1])
        ]
        of_kernel[(*place, c, o)] = total(pairs, name, chunk)
    return value, of_pictures, of_kernel
