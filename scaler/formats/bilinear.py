"""What a product is before anything is rounded: bilinear functions of two tensors that say what they compute."""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Einsum:
    """A product by an equation.

    Attributes:
        equation: Of two operands, without ellipses.
    """

    equation: str

    def __call__(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """The product, by `tf.einsum`."""
        return tf.einsum(self.equation, left, right)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution of pictures with a kernel, as a layer of Keras computes it.

    Attributes:
        strides: By spatial axis.
        padding: "valid" or "same".
        dilation: By spatial axis.
        data_format: "channels_last" or "channels_first".
    """

    strides: tuple[int, ...]
    padding: str
    dilation: tuple[int, ...]
    data_format: str

    def __call__(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """The convolution, by `keras.ops.conv`."""
        return keras.ops.conv(left, right, list(self.strides), self.padding, self.data_format, self.dilation)


Bilinear = Einsum | Convolution
