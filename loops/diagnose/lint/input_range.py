"""Measures the inputs of each layer on the sample, since a failure on far larger inputs does not matter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler

MARGIN = 10.0
"""The factor by which a layer's inputs may grow in training beyond those on the sample."""
_NOT_RUN = -1.0
_ONE_SIGN = 0.5


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The floating-point inputs of a layer on the sample.

    Attributes:
        amax: The largest magnitude; of several inputs, the smallest of theirs.
        one_signed: Whether most values have one sign, as after a ReLU.
    """

    amax: float
    one_signed: bool

    def reach(self, magnitude: float, one_signed: bool) -> bool:
        """Whether the layer may plausibly get inputs of this magnitude in training."""
        return magnitude <= self.amax * (MARGIN if self.one_signed or not one_signed else 1.0)


class InputRanges:
    """Measures the inputs of layers while a model runs.

    Args:
        layers: The layers to measure.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer]):
        self._layers = list(layers)
        # Variables can also be assigned inside a loop, or inside a function that the model calls.
        self._measured = {id(one): tf.Variable([_NOT_RUN, 0.0, 0.0], trainable=False) for one in self._layers}

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures the layers whenever a function runs that was traced in this context."""

        def measure(layer: keras.layers.Layer, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
            _measure(self._measured[id(layer)], (args, kwargs))
            return call(*args, **kwargs)

        with scaler.authoring.calls_through(self._layers, measure):
            yield

    def inputs(self, layer: keras.layers.Layer) -> Inputs | None:
        """The inputs of a layer, or None if it did not run."""
        amax, total, magnitudes = self._measured[id(layer)].numpy().tolist()
        return None if amax == _NOT_RUN else Inputs(amax, abs(total) > _ONE_SIGN * magnitudes)


@scaler.authoring.no_autograph
def _measure(found: tf.Variable, given: Any) -> None:
    inputs = [one for one in tf.nest.flatten(given) if tf.is_tensor(one) and one.dtype.is_floating]
    if not inputs:
        return
    with tf.name_scope("halfstep_seen"):
        amax, total, magnitudes = zip(*map(_sizes, inputs), strict=True)
        largest = tf.maximum(found[0], _least(tf.stack(amax)))
        found.assign(tf.stack([largest, found[1] + tf.add_n(total), found[2] + tf.add_n(magnitudes)]))


def _least(amax: tf.Tensor) -> tf.Tensor:
    """The smallest that is not 0: an input of zeros, such as an initial state, says nothing about the range."""
    least = tf.reduce_min(tf.where(amax > 0.0, amax, float("inf")))
    return tf.where(tf.math.is_inf(least), 0.0, least)


def _sizes(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The largest magnitude, the mean, and the mean magnitude of the finite values."""
    values = tf.cast(tensor, tf.float32)
    values = tf.where(tf.math.is_finite(values), values, 0.0)
    count = tf.maximum(tf.cast(tf.size(values), tf.float32), 1.0)
    magnitudes = tf.abs(values)
    amax = tf.maximum(tf.reduce_max(magnitudes), 0.0)  # An empty tensor has no largest value.
    return amax, tf.reduce_sum(values) / count, tf.reduce_sum(magnitudes) / count
