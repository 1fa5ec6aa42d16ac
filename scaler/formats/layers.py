"""Keras layers whose products round their operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import attention, replicas
from scaler.backend.layers import in_training, layers_by_path, open_to_variables
from scaler.errors import InvalidArgument
from scaler.formats.accumulators import Accumulator, Convolution, Einsum
from scaler.formats.products import Axes, Bilinear, Rounding, Summed, product, summed_by
from scaler.formats.tensors import TensorFormat, amax_of
from scaler.strategies import DelayedAmax, Event

Product = Callable[..., tf.Tensor]
Own = tuple[Callable[[Any, tf.Tensor], Any] | None, Callable[[tf.Tensor], tf.Tensor] | None]
"""What takes the place of a layer's bias, from it and the outputs so far, and of its activation function."""
_MARK = "halfstep_emulated"
PRODUCTS = "halfstep_products"
"""The attribute of an emulated layer that returns its product of a name."""
EMULATED_BY = "halfstep_emulated_by"
"""The attribute of a layer that says which `Emulated` changed it for good."""
UNIT = "halfstep_unit_scaled"
"""The attribute that marks a layer of `unit_scaled`."""
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def hook_of(layer: keras.layers.Layer) -> Callable | None:
    """What changes a layer of this kind. A subclass with another call computes something else."""
    call = type(layer).call
    if call is keras.layers.Dense.call or call is keras.layers.EinsumDense.call:
        return dense
    if isinstance(layer, _CONVOLUTIONS) and any(call is kind.call for kind in _CONVOLUTIONS):
        return convolution
    if call is keras.layers.MultiHeadAttention.call and attention.is_plain(layer):
        return _attention
    return None


def emulate(
    layers: dict[str, keras.layers.Layer],
    tensors: tuple[TensorFormat, TensorFormat, TensorFormat],
    strategy: DelayedAmax | None,
    accumulator: Accumulator | None,
) -> None:
    """Changes the products of layers: all of them, or none if one cannot be.

    Args:
        layers: By path.
        tensors: How activations, weights and gradients are rounded.
        strategy: Of delayed scaling.
        accumulator: How products sum, if not in float32 as the device does.
    """
    for path, layer in layers.items():
        if hasattr(layer, _MARK):
            raise InvalidArgument(f"{path}: this layer is emulated already. Create the model again for another format.")
        if hasattr(layer, UNIT):
            raise InvalidArgument(f"{path}: this layer is unit-scaled already. Emulate the model first, then scale it.")
        if getattr(layer, "quantization_mode", None) is not None:
            raise InvalidArgument(f"{path}: Keras has quantized this layer. Emulate a model that is not.")
        if strategy is not None and not layer.built:
            raise InvalidArgument(
                f"{path}: this layer has no weights yet, and delayed scaling keeps scales next to them. Call the model "
                'on a batch or build it first, or use scaling="current".'
            )
    for layer in layers.values():
        hook = hook_of(layer)
        assert hook is not None  # Only such layers are found.
        # Both operands of attention's products are activations.
        own = (tensors[0], tensors[0], tensors[2]) if hook is _attention else tensors
        products = functools.cache(functools.partial(product_of, layer, own, strategy, accumulator))
        hook(layer, products)
        object.__setattr__(layer, _MARK, tensors)
        object.__setattr__(layer, PRODUCTS, products)
        refuse_quantization(layer, "emulated in a narrow format")


def refuse_quantization(layer: keras.layers.Layer, how: str) -> None:
    """Has `layer.quantize` and a quantized dtype policy refused: Keras's quantized call would pass over ours.

    Args:
        layer: Any.
        how: What was done to it, to follow "this layer is".
    """

    @functools.wraps(layer.quantize)
    def quantize(*arguments: Any, **named: Any) -> None:
        raise InvalidArgument(
            f"{layer.path}: this layer is {how}, and Keras's quantize would drop that: a quantized layer computes "
            "otherwise. Create the model again, load its weights, and quantize that one."
        )

    # As Keras does for each layer.
    object.__setattr__(layer, "quantize", quantize)


def undo(layers: Iterable[keras.layers.Layer]) -> None:
    """Takes back what `emulate` did without a strategy."""
    for layer in layers:
        for name in ("call", attention.PRODUCTS, _MARK, PRODUCTS):
            vars(layer).pop(name, None)
        object.__setattr__(layer, "quantize", vars(layer)["quantize"].__wrapped__)


def changed(model: keras.layers.Layer) -> dict[str, str]:
    """How the layers of a model compute otherwise than Keras has them, in words.

    Args:
        model: A model, or one layer.

    Returns:
        By the paths of the layers that were changed, as in `scaler.observe.layers_by_path`: the `Emulated` that rounds
        their products, "unit_scaled", or both.
    """
    found: dict[str, list[str]] = {}
    for path, layer in layers_by_path(model).items():
        emulated = getattr(layer, EMULATED_BY, None)
        found[path] = ([] if emulated is None else [repr(emulated)]) + ["unit_scaled"] * hasattr(layer, UNIT)
    return {path: ", ".join(words) for path, words in found.items() if words}


class Scales(keras.layers.Layer):
    """A scale and the history that it comes from: the state of a `DelayedAmax`, as a part of a layer.

    An amax that is not finite leaves both as they were. Transformer Engine keeps the scale, too, but remembers the
    amax, and with it stays at this scale for as long as the history is.

    The variables are non-trainable ones of the layer, so that a step that is skipped puts them back with the moving
    statistics. They are not in the layer itself, since Keras's layers save and load a fixed list of their own.

    Args:
        layer: A layer that is built.
        name: Of the tensor.
        format: Of the tensor.
        strategy: Its `format` is replaced.
    """

    def __init__(self, layer: keras.layers.Layer, name: str, format: str, strategy: DelayedAmax):
        super().__init__(name=f"{layer.name}_{name}", dtype="float32", autocast=False)
        self._strategy = dataclasses.replace(strategy, format=format)
        state = self._strategy.init()
        self._state = type(state)
        for kind, value in zip(state._fields, state, strict=True):
            start = keras.initializers.Constant(float(tf.reduce_max(value)))
            self.add_weight(name=kind, shape=value.shape, initializer=start, trainable=False, autocast=False)
        self.built = True
        with open_to_variables(layer):
            setattr(layer, f"scales_of_{name}", self)

    def load_own_variables(self, store: Mapping) -> None:
        """As Keras calls it. Weights that were saved without emulation leave a scale as it is."""
        if len(store):
            super().load_own_variables(store)

    def scale(self) -> tf.Tensor:
        """The scale for this step, from past ones: scalar float32."""
        return tf.identity(self.variables[0])

    def after_moving(self, values: tf.Tensor) -> tf.Tensor:
        """The values, which also enter the history.

        The graph of a backward pass may have no other way to keep an operation that nothing depends on.
        """
        with tf.control_dependencies(self.move(values)):
            return tf.identity(values)

    def move(self, values: tf.Tensor) -> list:
        """Enters values into the history, for the next step."""
        if replicas.replica_count() > 1:
            raise InvalidArgument(
                'emulated: delayed scaling keeps one history, and here are several replicas. Use scaling="current".'
            )
        old = self._state(*map(tf.identity, self.variables))
        amax = amax_of(tf.cast(values, tf.float32))
        finite = tf.math.is_finite(amax)
        new = self._strategy.update(old, Event(tf.constant(True), tf.where(finite, amax, 0.0)))
        kept = [tf.where(finite, after, before) for after, before in zip(new, old, strict=True)]
        return [replicas.native(variable).assign(value) for variable, value in zip(self.variables, kept, strict=True)]


def product_of(
    layer: keras.layers.Layer | None,
    tensors: tuple[TensorFormat, TensorFormat, TensorFormat],
    strategy: DelayedAmax | None,
    accumulator: Accumulator | None,
    name: str,
) -> Product:
    """A product, one of a layer's, as a function (bilinear, left, right, summed) of two tensors.

    Args:
        layer: The layer, which keeps the scales of delayed scaling.
        tensors: How the left and the right operand and the gradient are rounded.
        strategy: Of delayed scaling.
        accumulator: How it sums, if not in float32 as the device does.
        name: Of the product, for the names of its variables.
    """
    scales = [
        Scales(layer, f"{name}_{kind}", each.format, strategy) if strategy is not None and each.scaled else None
        for kind, each in zip(("left", "right", "gradient"), tensors, strict=True)
    ]

    def apply(bilinear: Bilinear, one: Any, two: Any, summed: Summed) -> tf.Tensor:
        one, two = tf.convert_to_tensor(one), tf.convert_to_tensor(two)
        training = strategy is not None and in_training()
        # Read before the product, outside of its gradient.
        now = [None if own is None else own.scale() for own in scales]
        rounds = [functools.partial(each, scale=scale) for each, scale in zip(tensors, now, strict=True)]
        for own, values in zip(scales[:2], (one, two), strict=True):
            if own is not None and training:
                own.move(values)

        def round_gradient(values: tf.Tensor, axes: Axes) -> tf.Tensor:
            own = scales[2]
            return rounds[2](own.after_moving(values) if own is not None and training else values, axes)

        rounding = Rounding(rounds[0], rounds[1], round_gradient, tensors[0].in_blocks, tensors[2].in_blocks)
        return product(bilinear, one, two, summed, rounding, accumulator)

    return apply


def replace_call(layer: keras.layers.Layer, call: Callable) -> None:
    """Not by the layer's own way to set an attribute, which would look for variables in it."""
    object.__setattr__(layer, "call", functools.wraps(layer.call)(call))


def einsum(apply: Product, equation: str, left: Any, right: Any) -> tf.Tensor:
    """A product by an equation, of two operands."""
    left, right = tf.convert_to_tensor(left), tf.convert_to_tensor(right)
    plain, summed = summed_by(equation, left.shape.rank, right.shape.rank)
    return apply(Einsum(plain), left, right, summed)


def _behind(layer: keras.layers.Layer, outputs: tf.Tensor, own: Own, shape: list[int] | None = None) -> tf.Tensor:
    """The outputs of a product with the layer's bias, in a shape that broadcasts, behind its activation function."""
    parameter, activation = own
    if layer.bias is not None:
        bias = layer.bias if parameter is None else parameter(layer.bias, outputs)
        outputs = keras.ops.add(outputs, bias if shape is None else keras.ops.reshape(bias, shape))
    activation = layer.activation if activation is None else activation
    return outputs if activation is None else activation(outputs)


def dense(layer: keras.layers.Layer, product_of: Callable[[str], Product], own: Own = (None, None)) -> None:
    """Has a Dense or EinsumDense compute by `product_of("product")`."""
    apply = product_of("product")

    def call(inputs: Any, training: bool | None = None) -> Any:
        equation = layer.equation if isinstance(layer, keras.layers.EinsumDense) else "...i,ij->...j"
        return _behind(layer, einsum(apply, equation, inputs, layer.kernel), own)

    replace_call(layer, call)


def convolution(layer: keras.layers.Layer, product_of: Callable[[str], Product], own: Own = (None, None)) -> None:
    """Has a convolution compute by `product_of("product")`."""
    apply = product_of("product")
    rank, last = layer.rank, layer.data_format == "channels_last"
    channels = rank + 1 if last else 1
    others = tuple(axis for axis in range(rank + 2) if axis != channels)
    summed = Summed((channels,), (rank,), (channels,), (rank + 1,), others, others)
    shape = [layer.filters if axis == channels else 1 for axis in range(rank + 2)]
    causal = layer.padding == "causal"
    convolve = Convolution(
        strides=tuple(layer.strides),
        padding="valid" if causal else layer.padding,
        dilation=tuple(layer.dilation_rate),
        data_format=layer.data_format,
    )

    def call(inputs: Any) -> Any:
        if causal:
            before = (layer.dilation_rate[0] * (layer.kernel_size[0] - 1), 0)
            inputs = keras.ops.pad(inputs, [(0, 0), before, (0, 0)] if last else [(0, 0), (0, 0), before])
        return _behind(layer, apply(convolve, inputs, layer.kernel, summed), own, shape)

    replace_call(layer, call)


def _attention(layer: keras.layers.Layer, product_of: Callable[[str], Product]) -> None:
    """Has a MultiHeadAttention compute by two products."""
    scores, mixture = product_of("scores"), product_of("mixture")

    def by_equation(is_first: bool, equation: str, left: Any, right: Any) -> Any:
        return einsum(scores if is_first else mixture, equation, left, right)

    attention.replace_products(layer, by_equation)
