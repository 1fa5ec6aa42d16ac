"""Keras layers with the factors of unit scaling, one rule for each kind.

The operands of a product are as they are on both ways: what is multiplied is the result. So in unit variance each of
them fits a narrow format without a scale.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import attention
from scaler.backend.layers import layers_by_path
from scaler.formats import layers as emulation
from scaler.formats.layers import PRODUCTS, Behind, Product, replace_call
from scaler.formats.products import Summed
from scaler.formats.unit_factors import (
    factor_of_attention,
    factors_of_function,
    factors_of_sizes,
    scaled,
    terms,
)
from scaler.formats.unit_graph import Place

Rule = Callable[[Any, str, Place], None]
_PASSED = tuple(
    getattr(keras.layers, name)
    for name in ("InputLayer", "Flatten", "Reshape", "Permute", "Identity", "Dropout", "ZeroPadding1D", "ZeroPadding2D")
)
_FUNCTIONS = tuple(
    getattr(keras.layers, name) for name in ("Activation", "ReLU", "LeakyReLU", "ELU") if hasattr(keras.layers, name)
)
NAMES = (
    "Dense, EinsumDense, Conv1D, Conv2D, Conv3D, Embedding, MultiHeadAttention, LayerNormalization, "
    "BatchNormalization, Add, activation functions of single numbers, and layers that only move or drop values"
)


def rule_of(layer: Any) -> Rule | None:
    """What changes a layer of this kind, before it is called again; None without a rule."""
    kind = type(layer)
    if kind in _PASSED:
        return _leave
    if kind in _FUNCTIONS:
        return _function
    if kind is keras.layers.Add:
        return _sum
    if kind is keras.layers.Embedding:
        return _embedding
    if kind is keras.layers.LayerNormalization:
        return _normalization
    if kind is keras.layers.BatchNormalization:
        return None if getattr(layer, "synchronized", False) else _normalization
    hook = emulation.hook_of(layer)
    # Their kernel is a sum, or is not made of floating-point numbers.
    other = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None) is not None
    if hook is None or other:
        return None
    return _attention if isinstance(layer, keras.layers.MultiHeadAttention) else _product


def check_function(layer: Any, path: str) -> None:
    """Refuses a layer whose activation function has no factors.

    Raises:
        InvalidArgument: For one whose values depend on several numbers.
    """
    rule = rule_of(layer)
    if rule is _function or (rule is _product and layer.activation is not None):
        factors_of_function(layer.call if rule is _function else layer.activation, path, True)


def _leave(layer: Any, path: str, place: Place) -> None:
    pass


def _product(layer: Any, path: str, place: Place) -> None:
    """Dense, EinsumDense and the convolutions."""
    _draw(layer.kernel)
    if layer.bias is not None:
        layer.bias.assign(tf.zeros(layer.bias.shape))
    convolves = emulation.hook_of(layer) is emulation.convolution
    sizes = functools.partial(_convolved, layer) if convolves else _summed
    forward, backward = 1.0, 1.0
    if layer.activation is not None:
        forward, backward = factors_of_function(layer.activation, path, place.free)

    def product_of(name: str) -> Product:
        own = getattr(layer, PRODUCTS, None)
        inner: Product = _plain if own is None else own(name)

        def apply(function: Callable, left: Any, right: Any, summed: Summed) -> tf.Tensor:
            left, right = tf.convert_to_tensor(left), tf.convert_to_tensor(right)
            fan_in, fan_out, batch = sizes(left, right, summed)
            ahead, back = factors_of_sizes(fan_in, fan_out, place.free)
            result = inner(function, scaled(left, 1.0, back), scaled(right, 1.0, batch**-0.5), summed)
            return scaled(result, ahead)

        return apply

    def bias(layer: Any, outputs: tf.Tensor) -> tf.Tensor:
        return _parameter(layer.bias, outputs)

    def activated(layer: Any, outputs: tf.Tensor) -> tf.Tensor:
        if layer.activation is None:
            return outputs
        return scaled(layer.activation(scaled(outputs, 1.0, backward)), forward)

    hook = emulation.convolution if convolves else emulation.dense
    hook(layer, product_of, Behind(bias, activated))


def _plain(function: Callable, left: tf.Tensor, right: tf.Tensor, summed: Summed) -> tf.Tensor:
    return function(left, right)


def _summed(left: tf.Tensor, right: tf.Tensor, summed: Summed) -> tuple[float, float, Any]:
    """The terms of a sum in a product, in the gradient of its left operand and in that of its right one."""
    return terms(right, summed.right), terms(right, summed.right_again), terms(left, summed.left_again)


def _convolved(layer: Any, left: tf.Tensor, right: tf.Tensor, summed: Summed) -> tuple[float, float, Any]:
    """The same of a convolution. An input enters as many results as the kernel has positions for each stride."""
    kernel = right.shape.as_list()
    fan_out = math.prod(kernel[: layer.rank]) / math.prod(layer.strides) * layer.filters / layer.groups
    first = 1 if layer.data_format == "channels_last" else 2
    spatial = range(first, first + layer.rank)
    after = layer.compute_output_shape(tuple(left.shape))
    if None in [after[axis] for axis in spatial]:
        count = terms(left, [0, *spatial]) / math.prod(layer.strides)
    else:
        count = terms(left, [0]) * math.prod(after[axis] for axis in spatial)
    return math.prod(kernel[:-1]), fan_out, count


def _parameter(parameter: Any, outputs: tf.Tensor) -> tf.Tensor:
    """A parameter that is used once for each of many examples and positions: its gradient is a sum over them."""
    values = tf.convert_to_tensor(parameter)
    return scaled(values, 1.0, (terms(outputs, range(outputs.shape.rank)) / math.prod(values.shape)) ** -0.5)


def _embedding(layer: Any, path: str, place: Place) -> None:
    _draw(layer.embeddings)
    call = layer.call

    def own(inputs: Any) -> tf.Tensor:
        outputs = call(inputs)
        # A row has as many terms as there are places for each row, if all are as frequent.
        return scaled(outputs, 1.0, (terms(inputs, range(len(inputs.shape))) / layer.input_dim) ** -0.5)

    replace_call(layer, own)


def _normalization(layer: Any, path: str, place: Place) -> None:
    call = layer.call

    def own(inputs: Any, *arguments: Any, **named: Any) -> Any:
        before = {name: vars(layer)[name] for name in ("gamma", "beta") if vars(layer).get(name) is not None}
        try:
            for name, variable in before.items():
                object.__setattr__(layer, name, _parameter(variable, tf.convert_to_tensor(inputs)))
            return call(inputs, *arguments, **named)
        finally:
            for name, variable in before.items():
                object.__setattr__(layer, name, variable)

    replace_call(layer, own)


def _function(layer: Any, path: str, place: Place) -> None:
    call = layer.call
    forward, backward = factors_of_function(call, path, place.free)

    def own(inputs: Any, *arguments: Any, **named: Any) -> tf.Tensor:
        return scaled(call(scaled(tf.convert_to_tensor(inputs), 1.0, backward), *arguments, **named), forward)

    replace_call(layer, own)


def _sum(layer: Any, path: str, place: Place) -> None:
    call = layer.call

    def own(inputs: Any) -> Any:
        parts = [
            scaled(tf.convert_to_tensor(each), part, 1.0 if delayed else part)
            for each, part, delayed in zip(inputs, place.parts, place.delayed, strict=True)
        ]
        return call(parts)

    replace_call(layer, own)


def _attention(layer: Any, path: str, place: Place) -> None:
    """Its four projections, and the mixture of values. The scores have their factor already, 1 / sqrt(d)."""
    for inner, part in layers_by_path(layer).items():
        if emulation.hook_of(part) is emulation.dense:
            # Queries, keys and values come from the same place and meet again.
            _product(part, f"{path}/{inner}", Place(free=False))
    base = getattr(layer, PRODUCTS, None)
    causal = [False]
    call, signature = layer.call, inspect.signature(layer.call)

    def einsum(is_first: bool, equation: str, left: Any, right: Any) -> tf.Tensor:
        inner: Product = _plain if base is None else base("scores" if is_first else "mixture")
        if is_first:
            return emulation.einsum(inner, equation, left, right)

        def apply(function: Callable, weights: Any, values: Any, summed: Summed) -> tf.Tensor:
            factor = factor_of_attention(terms(values, summed.right), causal[0])
            operands = [scaled(tf.convert_to_tensor(each), 1.0, factor) for each in (weights, values)]
            return scaled(inner(function, *operands, summed), factor)

        return emulation.einsum(apply, equation, left, right)

    def own(*arguments: Any, **named: Any) -> Any:
        causal[0] = bool(signature.bind(*arguments, **named).arguments.get("use_causal_mask"))
        return call(*arguments, **named)

    attention.replace_products(layer, einsum)
    replace_call(layer, own)


def enter_branch(layer: Any, factor: float) -> None:
    """Multiplies the gradient of a layer's inputs, where a branch begins."""
    call = layer.call

    def own(*arguments: Any, **named: Any) -> Any:
        def into(each: Any) -> Any:
            inside = isinstance(each, tf.Tensor) and each.dtype.is_floating
            return scaled(each, 1.0, factor) if inside else each

        return call(*map(into, arguments), **{name: into(each) for name, each in named.items()})

    replace_call(layer, own)


def _draw(variable: Any) -> None:
    """Standard normal numbers, from Keras's own seeds."""
    variable.assign(keras.initializers.RandomNormal(stddev=1.0)(variable.shape, "float32"))
