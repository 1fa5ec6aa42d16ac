"""Runs one step and measures every floating-point and complex tensor of its graph.

Reading a tensor can prevent TensorFlow from fusing operations, and so change the result. The caller compares the scan
with the step as it runs to see whether it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.frames import Frame, Part
from loops.diagnose.graph.lines import line_in_custom_gradient, line_of
from loops.diagnose.graph.scaler_calls import recording_scaler_calls
from loops.diagnose.graph.step_frames import frames_of_step, handles_of
from loops.diagnose.graph.whereabouts import recording_layers

_UNSEEN = (tf.string, tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True)
class Scan:
    """The measured step.

    Attributes:
        outputs: The outputs of the step, as NumPy values.
        frames: The frames by tensor name, in the order in which their operations were created.
        losses: The names of the tensors that were passed to `scale`.
        gradients: For each `apply` and `unscale` the names of its gradients' tensors; None for a missing gradient.
        order: The layers' paths in the order of the forward pass, inner layers before outer ones.
        operations: The operations by the name of their output tensors.
        values: The values of the tensors, by name.
    """

    outputs: dict[str, Any]
    frames: dict[str, Frame]
    losses: list[str]
    gradients: list[list[str | None]]
    order: list[str]
    operations: dict[str, tf.Operation]
    values: dict[str, tf.Tensor]

    @property
    def failed(self) -> list[str]:
        """The names of the non-finite losses that the scaler got, or else of its non-finite gradients."""
        losses = [name for name in self.losses if name in self.frames and not self.frames[name].finite]
        grads = [name for given in self.gradients for name in given if name is not None]
        return losses or [name for name in grads if name in self.frames and not self.frames[name].finite]

    def line(self, name: str) -> str | None:
        """The line of Python that created a tensor; for a gradient, the line that created its forward tensor."""
        frame = self.frames[name]
        if frame.custom and (line := line_in_custom_gradient(self.operations[name])):
            return line
        if frame.part is Part.BACKWARD:
            read = [one for one in frame.inputs if one in self.frames]
            forward = [one for one in read if self.frames[one].part is Part.FORWARD]
            return next((line for one in forward if (line := line_of(self.operations[one]))), None)
        return line_of(self.operations[name])


def scan(
    take: Callable,
    batch: Any,
    layers: Mapping[str, keras.layers.Layer],
    scalers: Sequence[scaler.LossScaler],
    factor: float | None = None,
) -> Scan:
    """Runs a step and measures it. It may change weights and other state, which the caller restores.

    Args:
        take: The step, a function of a batch that XLA does not compile.
        batch: A batch of tensors.
        layers: The layers of the model, by path.
        scalers: The loss scalers of the step.
        factor: A number by which each loss is multiplied before `scale`; None for no change.
    """
    recorded: dict[str, Any] = {}
    at = None if factor is None else tf.constant(factor)

    def observed(batch: Any) -> tuple[Any, list[tf.Tensor]]:
        with recording_scaler_calls(scalers, at, moves=False) as calls, recording_layers(layers) as places:
            outputs = take(batch)
        # Measuring a tensor in the graph takes more operations than computing it, so the values are returned.
        seen = _numbers(tf.compat.v1.get_default_graph())
        recorded.update(calls=calls, places=places, batch=tf.nest.flatten(batch, expand_composites=True), seen=seen)
        return outputs, seen

    concrete = tf.function(observed).get_concrete_function(batch)
    handles = handles_of(concrete)
    outputs, numbers = concrete(batch)
    calls, places = recorded["calls"], recorded["places"]
    values = {tensor.name: value for tensor, value in zip(recorded["seen"], numbers, strict=True)}
    operations = concrete.graph.get_operations()
    given = {tensor.name for tensor in recorded["batch"] if isinstance(tensor, tf.Tensor)}
    return Scan(
        outputs={name: value.numpy() for name, value in outputs.items()},
        frames=frames_of_step(operations, values, calls, places, given, handles),
        losses=[loss.name for loss in calls.losses],
        gradients=[[_name(grad) for grad in grads] for grads in calls.gradients],
        order=places.order,
        operations={tensor.name: operation for operation in operations for tensor in operation.outputs},
        values=values,
    )


@tf.autograph.experimental.do_not_convert
def _numbers(graph: tf.Graph) -> list[tf.Tensor]:
    tensors = [tensor for operation in graph.get_operations() for tensor in operation.outputs]
    return [tensor for tensor in tensors if tensor.dtype not in _UNSEEN]


def _name(grad: Any) -> str | None:
    if grad is None:
        return None
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad).name
