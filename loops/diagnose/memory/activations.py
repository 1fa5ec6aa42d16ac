"""Counts the bytes that each layer saves for the backward pass, from a traced step that is not run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import native
from loops.diagnose.graph.calls import LayerCall, Traced, loss_of, recording_calls, rounding_is_no_warning
from loops.diagnose.memory.buffers import saved_buffers
from loops.support.batches import explaining, parts


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """The tensors that the forward pass saves for the backward pass.

    A layer stands for its name, or for its path where several layers have that name; None stands for the loss and for
    all operations outside of layers.

    Attributes:
        activations: The bytes of tensors computed from the batch, by layer.
        copies: The bytes of copies of weights, such as float32 weights cast to 16 bits, by layer.
        uncounted: The number of tensors whose static shape is unknown, by layer.
        traced: The graph, with the calls of the layers.
    """

    activations: collections.Counter[str | None]
    copies: collections.Counter[str | None]
    uncounted: collections.Counter[str | None]
    traced: Traced

    def bytes(self) -> int:
        """All bytes of known size."""
        return sum(self.activations.values()) + sum(self.copies.values())


def saved_tensors(model: keras.Model, loss: Callable[..., Any], batch: Any) -> SavedTensors:
    """Traces a forward and a backward pass, and counts the tensors saved between them.

    Args:
        model: A model that is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        batch: `(x, y)` or `(x, y, sample_weight)`, of tensors.
    """
    given = parts(batch, "doctor")
    found: dict[str, Any] = {}

    def differentiate(x: Any, y: Any, weight: Any) -> list:
        found["batch"] = [one for one in tf.nest.flatten((x, y, weight), expand_composites=True) if tf.is_tensor(one)]
        with tf.GradientTape() as tape:
            value = mean_loss(model, loss, model(x, training=True), y, weight)
        # Not a constant, which TensorFlow would fold into its products.
        found["seed"] = tf.identity(tf.constant(1.0))
        return tape.gradient(value, model.trainable_variables, output_gradients=found["seed"])

    calls: list[LayerCall] = []
    specs = tf.nest.map_structure(lambda one: tf.type_spec_from_value(one) if tf.is_tensor(one) else one, given)
    with (
        recording_calls(scaler.observe.layers_of(model), calls),
        rounding_is_no_warning(),
        explaining("doctor", model, given[0], given[1]),
    ):
        graph = tf.function(differentiate).get_concrete_function(*specs).graph
    handles = [graph.capture(native(variable).handle) for variable in model.trainable_variables]
    traced = Traced(graph, calls, [], found["seed"])
    saved = SavedTensors(collections.Counter(), collections.Counter(), collections.Counter(), traced)
    for buffer in saved_buffers(graph, found["seed"], found["batch"], handles):
        place = traced.place_of_node(buffer.node)
        if buffer.bytes is None:
            saved.uncounted[place] += 1
        else:
            (saved.copies if buffer.copies_weights else saved.activations)[place] += buffer.bytes
    return saved


def mean_loss(model: keras.Model, loss: Callable[..., Any], prediction: Any, y: Any, weight: Any) -> tf.Tensor:
    """The loss in float32, plus the model's own penalties."""
    value = tf.cast(loss_of(loss, prediction, y, weight), tf.float32)
    return tf.add_n([value, *(tf.cast(penalty, tf.float32) for penalty in model.losses)])
