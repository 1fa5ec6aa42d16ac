"""What each layer keeps for the backward pass: the forward pass, the loss and the gradients, traced and not run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import native
from loops.diagnose.graph.calls import LayerCall, Traced, recorded, rounding_is_no_warning
from loops.diagnose.memory.buffers import kept_buffers
from loops.support.batches import explaining, parts


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the forward pass keeps until the backward pass.

    Attributes:
        activations: For each place the bytes of what is computed from the batch.
        copies: For each place the bytes of copies of weights: those of float32 weights in 16 bits, say.
        uncounted: For each place how many tensors have a size that the graph does not say.
        traced: The graph, with the calls of the layers.
    """

    activations: collections.Counter[str | None]
    copies: collections.Counter[str | None]
    uncounted: collections.Counter[str | None]
    traced: Traced

    def bytes(self) -> int:
        """All of it, of known size."""
        return sum(self.activations.values()) + sum(self.copies.values())


def kept_by(model: keras.Model, loss: Callable[..., Any], batch: Any) -> Kept:
    """Traces a forward and a backward pass, and counts what is kept between them.

    Args:
        model: Built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        batch: `(x, y)` or `(x, y, sample_weight)`, of tensors.

    Returns:
        Bytes by place: the innermost layer's name, its path where several have that name, or None for the loss and for
        what stands outside of all layers.
    """
    given = parts(batch, "doctor")
    found: dict[str, Any] = {}

    def differentiate(x: Any, y: Any, weight: Any) -> list:
        found["batch"] = [one for one in tf.nest.flatten((x, y, weight), expand_composites=True) if tf.is_tensor(one)]
        with tf.GradientTape() as tape:
            value = mean_loss(model, loss, model(x, training=True), y, weight)
        # Not a constant, which would be folded into what it is multiplied by.
        found["seed"] = tf.identity(tf.constant(1.0))
        return tape.gradient(value, model.trainable_variables, output_gradients=found["seed"])

    calls: list[LayerCall] = []
    specs = tf.nest.map_structure(lambda one: tf.type_spec_from_value(one) if tf.is_tensor(one) else one, given)
    with (
        recorded(scaler.observe.layers_of(model), calls),
        rounding_is_no_warning(),
        explaining("doctor", model, given[0], given[1]),
    ):
        graph = tf.function(differentiate).get_concrete_function(*specs).graph
    handles = [graph.capture(native(variable).handle) for variable in model.trainable_variables]
    traced = Traced(graph, calls, [], found["seed"], frozenset(), [])
    kept = Kept(collections.Counter(), collections.Counter(), collections.Counter(), traced)
    for buffer in kept_buffers(graph, found["seed"], found["batch"], handles):
        place = traced.place_of_node(buffer.node.removeprefix("gradient_tape/"))
        if buffer.bytes is None:
            kept.uncounted[place] += 1
        else:
            (kept.copies if buffer.copies_weights else kept.activations)[place] += buffer.bytes
    return kept


def mean_loss(model: keras.Model, loss: Callable[..., Any], prediction: Any, y: Any, weight: Any) -> tf.Tensor:
    """The loss in float32, with the model's own penalties."""
    result = loss(y, prediction) if weight is None else loss(y, prediction, weight)
    value = tf.cast(result[0] if isinstance(result, tuple) else result, tf.float32)
    return tf.add_n([value, *(tf.cast(penalty, tf.float32) for penalty in model.losses)])
