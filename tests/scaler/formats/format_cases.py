"""Formats as `ml_dtypes` has them, and blocks in NumPy as their papers write them."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

HOW = {
    "eager": lambda function: function,
    "graph": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}
BITS = {
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
    "float4_e2m1fn": 4,
}
ELEMENT = {
    "mxfp8_e4m3": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6_e2m3": "float6_e2m3fn",
    "mxfp6_e3m2": "float6_e3m2fn",
    "mxfp4": "float4_e2m1fn",
    "nvfp4": "float4_e2m1fn",
}
LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15, "float6_e2m3fn": 2, "float6_e3m2fn": 4, "float4_e2m1fn": 2}
"""emax of each element: the exponent of its largest power of two."""


def dtype_of(name):
    if not hasattr(np, name) and not hasattr(ml_dtypes, name):
        pytest.skip(f"ml_dtypes {ml_dtypes.__version__} has no {name}")
    return getattr(np, name) if hasattr(np, name) else getattr(ml_dtypes, name)


@functools.cache
def values_of(name):
    """Every finite value of a format, ascending, as float64."""
    kind = np.uint16 if BITS[name] == 16 else np.uint8
    with np.errstate(invalid="ignore"):  # Of NaN with payloads.
        every = np.arange(2 ** BITS[name]).astype(kind).view(dtype_of(name)).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


def cast(values, name):
    """There and back by `ml_dtypes`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values, np.float32).astype(dtype_of(name)).astype(np.float32)


def saturated(values, name):
    largest = values_of(name)[-1]
    return cast(np.clip(values, -largest, largest), name)


def mx(values, name):
    """Rouhani et al. 2023, algorithm 1, along the last axis, in blocks of 32."""
    element, result = ELEMENT[name], np.empty_like(values)
    for first in range(0, values.shape[-1], 32):
        block = values[..., first : first + 32].astype(np.float64)
        amax = np.abs(block).max(axis=-1, keepdims=True)
        exponent = np.floor(np.log2(np.where(amax > 0, amax, 2.0**-140))) - LARGEST_EXPONENT[element]
        scale = 2.0 ** np.clip(exponent, -127, 127)
        result[..., first : first + 32] = saturated(block / scale, element) * scale
    return result


def nvfp4(values):
    """NVIDIA 2025, along the last axis: every operation in float32."""
    amax = np.float32(np.abs(values).max())
    encode = np.float32(6 * 448) / amax if amax > 0 else np.float32(1)
    decode, result = np.float32(1) / encode, np.empty_like(values)
    for first in range(0, values.shape[-1], 16):
        block = values[..., first : first + 16]
        largest = np.abs(block).max(axis=-1, keepdims=True)
        scale = saturated(largest / np.float32(6) * encode, "float8_e4m3fn")
        with np.errstate(divide="ignore"):
            factor = np.minimum(np.float32(1) / (scale * decode), np.float32(2.0**126))
        result[..., first : first + 16] = saturated(block * factor, "float4_e2m1fn") * (scale * decode)
    return result


def blocks(values, name, axis):
    moved = np.moveaxis(values, axis, -1)
    return np.moveaxis(nvfp4(moved) if name == "nvfp4" else mx(moved, name), -1, axis)


def assert_same_bits(found, wanted):
    """The same bits of every number, and a NaN for every NaN."""
    found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


layers = keras.layers
LAYERS = {
    "dense": (lambda: layers.Dense(3, activation="tanh"), [(2, 4, 6)]),
    "einsum": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"), [(2, 4, 6)]),
    "ellipsis": (lambda: layers.EinsumDense("...c,cd->...d", (4, 3)), [(2, 4, 6)]),
    "causal": (lambda: layers.Conv1D(3, 3, padding="causal", dilation_rate=2), [(2, 8, 4)]),
    "strided": (lambda: layers.Conv2D(4, 3, strides=2, padding="same", groups=2, activation="relu"), [(1, 5, 5, 4)]),
    "volume": (lambda: layers.Conv3D(3, 2, use_bias=False), [(2, 3, 3, 3, 2)]),
    "attention": (lambda: layers.MultiHeadAttention(1, 3), [(1, 2, 4), (1, 3, 4)]),
}
"""How each kind of layer is made, and the shapes of its inputs."""


def gradients_of(layer, inputs, upstream):
    """Outputs, and the gradients of all inputs and weights."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(*inputs)
    return outputs, *tape.gradient(outputs, [*inputs, *layer.trainable_variables], upstream)


def before_and_after(kind, change):
    """What a layer of a kind computes, with its gradients, and what it computes after a change."""
    make, shapes = LAYERS[kind]
    inputs, layer = [tf.constant(numbers(*shape)) for shape in shapes], make()
    upstream = numbers(*layer(*inputs).shape)
    before = gradients_of(layer, inputs, upstream)
    change(layer)
    return before, gradients_of(layer, inputs, upstream)
