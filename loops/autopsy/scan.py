"""One step under full observation: every floating-point tensor of its graph is measured.

Reading a tensor can keep TensorFlow from joining operations, and so change what it computes. Whoever compares the scan
with the step as it runs learns whether it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.autopsy.frames import Frame, Part
from loops.autopsy.listening import Heard, listening
from loops.autopsy.whereabouts import Whereabouts, backward_layers, line_of, noting

_MEASURED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Scan:
    """What one step gave.

    Attributes:
        outputs: Of the step, as numbers.
        frames: By name of tensor, in the order in which the operations were made.
        losses: The names of the tensors that were given to `scale`.
        gradients: For each `apply`, the names of its gradients' tensors; None where there is none.
        order: The layers' paths in the order of the forward pass, parts before the whole.
        operations: By name of tensor.
    """

    outputs: dict[str, Any]
    frames: dict[str, Frame]
    losses: list[str]
    gradients: list[list[str | None]]
    order: list[str]
    operations: dict[str, tf.Operation]

    def line(self, name: str) -> str | None:
        """The line of Python that made a tensor, or of the backward pass the tensor whose gradient it computes."""
        frame = self.frames[name]
        if frame.part is Part.BACKWARD:
            forward = [one for one in frame.inputs if self.frames[one].part is Part.FORWARD]
            return next((line for one in forward if (line := line_of(self.operations[one]))), None)
        return line_of(self.operations[name])


def scan(
    take: Callable,
    batch: Any,
    layers: Mapping[str, keras.layers.Layer],
    scalers: Sequence[scaler.LossScaler],
    also: Callable[[tf.Graph], tf.Tensor] | None = None,
    factor: float | None = None,
) -> Scan:
    """Takes a step and measures it. It moves weights and all: put them back.

    Args:
        take: The step, a function of a batch, not compiled by XLA.
        batch: Tensors.
        layers: The model's, by path.
        scalers: The step's.
        also: Given the traced graph, one more tensor to measure, under the name "also".
        factor: Multiplies each loss on its way into `scale`, as for `listening`.
    """
    operations: list[tf.Operation] = []
    kept: dict[str, Any] = {}
    at = None if factor is None else tf.constant(factor)

    def observed(batch: Any) -> tuple[Any, tf.Tensor]:
        with listening(scalers, at, moves=False) as heard, noting(layers) as places:
            outputs = take(batch)
        kept.update(heard=heard, places=places, batch=tf.nest.flatten(batch))
        return outputs, _measure_all(operations, also)

    outputs, measured = tf.function(observed)(batch)
    frames = _frames(operations, measured.numpy(), kept["heard"], kept["places"], kept["batch"])
    heard = kept["heard"]
    return Scan(
        outputs={name: value.numpy() for name, value in outputs.items()},
        frames=frames,
        losses=[loss.name for loss in heard.losses],
        gradients=[[_name(grad) for grad in grads] for grads in heard.gradients],
        order=kept["places"].order,
        operations={tensor.name: operation for operation in operations for tensor in _floats(operation)},
    )


@tf.autograph.experimental.do_not_convert
def _measure_all(operations: list[tf.Operation], also: Callable | None) -> tf.Tensor:
    graph = tf.compat.v1.get_default_graph()
    operations[:] = graph.get_operations()
    tensors = [tensor for operation in operations for tensor in _floats(operation)]
    if also is not None:
        tensors.append(also(graph))
    return tf.stack([_measure(tensor) for tensor in tensors])


def _floats(operation: tf.Operation) -> list[tf.Tensor]:
    return [tensor for tensor in operation.outputs if tensor.dtype in _MEASURED]


def _measure(tensor: tf.Tensor) -> tf.Tensor:
    values = tf.reshape(tf.cast(tensor, tf.float64), [-1])
    is_nan = tf.math.is_nan(values)
    magnitudes = tf.abs(tf.where(is_nan, tf.zeros_like(values), values))
    # An empty tensor has no largest value.
    amax = tf.maximum(tf.reduce_max(magnitudes), 0.0)
    return tf.stack([amax, tf.cast(tf.reduce_any(is_nan), tf.float64)])


def _computed_from(operation: tf.Operation) -> Iterator[str]:
    """The floating-point tensors that an operation reads, also through the lists of a loop."""
    waiting, seen = list(operation.inputs), set()
    while waiting:
        tensor = waiting.pop()
        if tensor.dtype in _MEASURED:
            yield tensor.name
        elif tensor.dtype == tf.variant and tensor.op.name not in seen:
            seen.add(tensor.op.name)
            waiting += tensor.op.inputs


def _name(grad: Any) -> str | None:
    if grad is None:
        return None
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad).name


def _frames(
    operations: Sequence[tf.Operation], measured: np.ndarray, heard: Heard, places: Whereabouts, batch: Sequence
) -> dict[str, Frame]:
    layers = backward_layers([one.name for one in operations], places.by_number(len(operations)))
    parts = _parts(operations, heard)
    penalties = places.in_regularizers()
    given = {tensor.name for tensor in batch if isinstance(tensor, tf.Tensor)}
    rows = iter(measured)
    frames: dict[str, Frame] = {}
    for number, (operation, layer, part) in enumerate(zip(operations, layers, parts, strict=True)):
        inputs = tuple(_computed_from(operation))
        for tensor in _floats(operation):
            amax, has_nan = next(rows)
            frames[tensor.name] = Frame(
                name=tensor.name,
                kind=operation.type,
                dtype=tensor.dtype.name,
                part=part,
                layer=layer,
                inputs=inputs,
                amax=float(amax),
                has_nan=bool(has_nan),
                source=_source(operation, tensor, given),
                penalty=number in penalties,
            )
    also = next(rows, None)
    if also is not None:
        frames["also"] = Frame("also", "", "float32", Part.OTHER, None, (), float(also[0]), bool(also[1]))
    return frames


def _source(operation: tf.Operation, tensor: tf.Tensor, given: set[str]) -> str | None:
    if tensor.name in given:
        return "batch"
    return "variable" if operation.type == "ReadVariableOp" else None


def _parts(operations: Sequence[tf.Operation], heard: Heard) -> list[Part]:
    """Forward until a loss is scaled, backward until its gradients are taken, and so on."""
    parts, now, moments = [], Part.FORWARD, list(heard.moments)
    for number, operation in enumerate(operations):
        while moments and moments[0][1] <= number:
            now = Part.BACKWARD if moments.pop(0)[0] else Part.OTHER
        parts.append(Part.BACKWARD if operation.name.startswith("gradient_tape/") else now)
    return parts
