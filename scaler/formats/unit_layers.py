"""Unit scaling, layer by layer: a rule for each kind of layer, and the constants that it multiplies by.

The operands of a product are as they are on both ways: what is multiplied is the result. So in unit variance each of
them fits a narrow format without a scale.
"""

from __future__ import annotations

import functools
import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from scaler.backend import attention
from scaler.backend.layers import layers_by_path
from scaler.errors import InvalidArgument
from scaler.formats import layers as emulation
from scaler.formats.layers import PRODUCTS, Product, replace_call
from scaler.formats.products import Summed


class Place(NamedTuple):
    """What a call's place in the graph says.

    Attributes:
        free: Whether its pass back may have another factor than its pass forward.
        into_branch: The factor on the gradient of its inputs, as the entry of a branch; 1 elsewhere.
        parts: Of a sum, the factor of each input; empty for other calls.
        delayed: Of a sum, whether the gradient of each input is multiplied at the entry of its branch, not here.
    """

    free: bool
    into_branch: float = 1.0
    parts: tuple[float, ...] = ()
    delayed: tuple[bool, ...] = ()


Rule = Callable[[Any, str, Place], None]
NAMES = (
    "Dense, EinsumDense, Conv1D, Conv2D, Conv3D, Embedding, MultiHeadAttention, LayerNormalization, "
    "BatchNormalization, Add, activation functions of single numbers, and layers that only move or drop values"
)
_POINTS = 4096
_NORMAL = np.array([statistics.NormalDist().inv_cdf((number + 0.5) / _POINTS) for number in range(_POINTS)], np.float32)
"""Quantiles of a standard normal law."""


def rule_of(layer: Any) -> Rule | None:
    """What changes a layer of this kind, before it is called again; None without a rule."""
    if type(layer) in _RULES:
        return None if getattr(layer, "synchronized", False) else _RULES[type(layer)]
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
    """For a layer that moves or drops values."""


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
            ahead, back = _together(fan_in**-0.5, fan_out**-0.5, place.free)
            result = inner(function, scaled(left, 1.0, back), scaled(right, 1.0, batch**-0.5), summed)
            return scaled(result, ahead)

        return apply

    def activation(outputs: tf.Tensor) -> tf.Tensor:
        return scaled(layer.activation(scaled(outputs, 1.0, backward)), forward)

    hook = emulation.convolution if convolves else emulation.dense
    hook(layer, product_of, (_parameter, None if layer.activation is None else activation))


def _plain(function: Callable, left: tf.Tensor, right: tf.Tensor, summed: Summed) -> tf.Tensor:
    """A product whose operands are not rounded."""
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
    """The gradient of a row is a sum over the places that have it."""
    _draw(layer.embeddings)
    call = layer.call

    def own(inputs: Any) -> tf.Tensor:
        outputs = call(inputs)
        # A row has as many terms as there are places for each row, if all are as frequent.
        return scaled(outputs, 1.0, (terms(inputs, range(len(inputs.shape))) / layer.input_dim) ** -0.5)

    replace_call(layer, own)


def _normalization(layer: Any, path: str, place: Place) -> None:
    """The gradients of gain and offset are sums over all positions."""
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
    """A layer that is an activation function."""
    call = layer.call
    forward, backward = factors_of_function(call, path, place.free)

    def own(inputs: Any, *arguments: Any, **named: Any) -> tf.Tensor:
        return scaled(call(scaled(tf.convert_to_tensor(inputs), 1.0, backward), *arguments, **named), forward)

    replace_call(layer, own)


def _sum(layer: Any, path: str, place: Place) -> None:
    """A weighted sum."""
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


def scaled(values: tf.Tensor, forward: Any = 1.0, backward: Any = 1.0) -> tf.Tensor:
    """Values multiplied by one constant on the way forward, and their gradient by another on the way back.

    Args:
        values: Of any floating dtype. The result has it, too.
        forward: A constant, or a scalar that depends on shapes alone.
        backward: The same.

    Raises:
        InvalidArgument: From the gradient of a gradient, which would be of neither.
    """
    if isinstance(forward, float) and isinstance(backward, float) and forward == backward == 1.0:
        return values

    @tf.custom_gradient
    def behind(upstream: tf.Tensor) -> tuple:
        def again(_: tf.Tensor) -> tf.Tensor:
            raise InvalidArgument(
                "unit_scaled: a gradient of gradients, as a gradient penalty takes it. Unit scaling multiplies the "
                "gradients of a pass back by constants of their own, so they are not those of the loss. Leave the "
                "penalty out, or train the model as it was, with a loss scale."
            )

        return upstream * tf.cast(backward, upstream.dtype), again

    @tf.custom_gradient
    def ahead(values: tf.Tensor) -> tuple:
        return values * tf.cast(forward, values.dtype), behind

    return ahead(values)


def _together(forward: float, backward: float, free: bool) -> tuple[float, float]:
    """Two factors as they are, or their geometric mean twice if they must not differ."""
    mean = math.sqrt(forward * backward)
    return (forward, backward) if free else (mean, mean)


def factors_of_function(function: Callable, name: str, free: bool) -> tuple[float, float]:
    """The factors of an activation function of standard normal numbers: of its values, and of its slopes.

    Each makes a mean square one. The variance of values with a mean, as those of ReLU, is then less than one, but the
    next product sums their squares: with a variance of one its own would be 1.47, and grow from layer to layer.

    Args:
        function: Of one tensor.
        name: Of the layer, for the error.
        free: Whether they may differ.

    Raises:
        InvalidArgument: If a value of the function depends on more than one number, as of softmax.
    """
    with tf.GradientTape() as tape:
        numbers = tf.constant(_NORMAL)
        tape.watch(numbers)
        values = function(numbers[None])[0]
    reversed_values = function(tf.reverse(numbers, [0])[None, : _POINTS // 2])[0]
    if not np.allclose(reversed_values, values[::-1][: _POINTS // 2], atol=1e-5):
        raise InvalidArgument(
            f"{name}: an activation function whose values depend on several numbers has no rule of unit scaling. Put "
            "it into the loss, or train the model as it is, with a loss scale."
        )
    if np.array_equal(values, numbers):
        return 1.0, 1.0
    slopes = tape.gradient(values, numbers)
    return _together(1 / _root_mean_square(values), 1 / _root_mean_square(slopes), free)


def _root_mean_square(values: tf.Tensor) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def factor_of_attention(keys: int | tf.Tensor, causal: bool) -> tf.Tensor:
    """The factor of a mixture of independent values, whose weights are the softmax of standard normal scores.

    Of n values it has a variance of e / n, and of one value that of the value. With a causal mask the n-th
    position mixes n values: the mean over positions becomes 1.

    Args:
        keys: The number of positions.
        causal: Whether there is a causal mask.

    Returns:
        Scalar float32.
    """
    count = tf.cast(keys, tf.float32)
    seen = tf.range(1.0, count + 1.0) if causal else count[None]
    return tf.math.rsqrt(tf.reduce_mean(math.e / (seen - 1.0 + math.e)))


def terms(values: tf.Tensor, axes: Sequence[int]) -> Any:
    """The number of positions along some axes: an int if it is known, otherwise a scalar float32."""
    known = [values.shape[axis] for axis in axes]
    if None not in known:
        return math.prod(known)
    dynamic = tf.shape(values)
    return tf.reduce_prod(tf.stack([tf.cast(dynamic[axis], tf.float32) for axis in axes]))


_MOVES = ("InputLayer", "Flatten", "Reshape", "Permute", "Identity", "Dropout", "ZeroPadding1D", "ZeroPadding2D")
_FUNCTIONS = ("Activation", "ReLU", "LeakyReLU", "ELU")
_RULES: dict[type, Rule] = {
    **{getattr(keras.layers, name): _leave for name in _MOVES},
    **{getattr(keras.layers, name): _function for name in _FUNCTIONS if hasattr(keras.layers, name)},
    keras.layers.Add: _sum,
    keras.layers.Embedding: _embedding,
    keras.layers.LayerNormalization: _normalization,
    keras.layers.BatchNormalization: _normalization,
}
"""By the type of a layer. Products have theirs by `hook_of`."""
