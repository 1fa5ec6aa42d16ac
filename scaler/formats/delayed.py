"""The scale of a layer's tensor from the largest magnitudes of past steps, in variables of the layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.layers import open_to_variables
from scaler.errors import InvalidArgument
from scaler.formats.scales import amax_of
from scaler.strategies import DelayedAmax, Event


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

    @property
    def scale(self) -> tf.Tensor:
        """The scale for this step, from past ones: scalar float32."""
        return tf.identity(self.variables[0])

    def scale_for(self, values: tf.Tensor, training: bool) -> tf.Tensor:
        """The scale for this step; in training, values also enter the history for the next one."""
        scale = self.scale
        if training:
            self._move(values)
        return scale

    def after_moving(self, values: tf.Tensor) -> tf.Tensor:
        """The values, which also enter the history.

        The graph of a backward pass may have no other way to keep an operation that nothing depends on.
        """
        with tf.control_dependencies(self._move(values)):
            return tf.identity(values)

    def _move(self, values: tf.Tensor) -> list:
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
