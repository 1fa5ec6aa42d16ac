"""Which tensors a forward pass saves for the backward pass, by layer, from a traced step that is not run."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import native
from loops.diagnose.graph.calls import LayerCall, Traced, loss_of, recording_calls, rounding_is_no_warning
from loops.diagnose.graph.operations import LOOPS, READS, depending, needed, root_of
from loops.support.batches import explaining, parts

_LISTS = ("EmptyTensorList", "TensorListReserve")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The memory that a training step needs, in bytes, for a layer or for all.

    Attributes:
        weights: The model's variables, trained or not.
        masters: Float32 copies of 16-bit weights.
        slots: The optimizer's variables; None if the optimizer is a function, whose variables are unknown.
        gradients: The gradients of the trained variables.
        copies: Copies of weights that the backward pass reads, such as weights cast to 16 bits.
        activations: Tensors computed from the batch that the forward pass saves for the backward pass.
        uncounted: The number of saved tensors whose static shape is unknown.
    """

    weights: int = 0
    masters: int = 0
    slots: int | None = 0
    gradients: int = 0
    copies: int = 0
    activations: int = 0
    uncounted: int = 0

    @property
    def total(self) -> int:
        """The sum of all known bytes: slightly above the peak of a step, without the workspace of operations."""
        return self.weights + self.masters + (self.slots or 0) + self.gradients + self.copies + self.activations

    def __add__(self, other: Bytes) -> Bytes:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Bytes(*sums)


def saved_tensors(model: keras.Model, loss: Callable[..., Any], batch: Any) -> tuple[dict[str | None, Bytes], Traced]:
    """Traces a forward and a backward pass, and counts the tensors saved between them.

    Args:
        model: A model that is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        batch: `(x, y)` or `(x, y, sample_weight)`, of tensors.

    Returns:
        By layer the activations, the copies and the number of tensors that are not counted; and the trace. A layer
        stands for its name, or for its path where several layers have that name; None stands for the loss and for all
        operations outside of layers.
    """
    given = parts(batch, "doctor")
    found: dict[str, Any] = {}

    def differentiate(x: Any, y: Any, weight: Any) -> list:
        found["batch"] = [one for one in tf.nest.flatten((x, y, weight), expand_composites=True) if tf.is_tensor(one)]
        with tf.GradientTape() as tape:
            value = tf.cast(loss_of(loss, model(x, training=True), y, weight), tf.float32)
            value = tf.add_n([value, *(tf.cast(penalty, tf.float32) for penalty in model.losses)])
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
    saved: dict[str | None, Bytes] = collections.defaultdict(Bytes)
    for node, size in saved_buffers(graph, found["seed"], found["batch"], handles):
        saved[traced.place_of_node(node)] += size
    return saved, traced


def bytes_of(tensor: tf.Tensor) -> int | None:
    """The size of a tensor in bytes; None if its static shape is unknown."""
    if tensor.dtype == tf.variant:
        return _bytes_of_list(tensor)
    if not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape) * tensor.dtype.size


def _bytes_of_list(tensor: tf.Tensor) -> int | None:
    """The bytes of a tensor list in which a loop saves one value per iteration for its gradient."""
    if tensor.op.type not in LOOPS:
        return None
    creator = root_of(tensor.op.inputs[tensor.value_index]).op
    if creator.type not in _LISTS:
        return None
    shape = tf.get_static_value(creator.inputs[0])
    iterations = max((_length(one) for one in tensor.op.inputs), default=0)
    if shape is None or shape.min(initial=1) < 0 or not iterations:
        return None
    return int(shape.prod()) * iterations * tf.as_dtype(creator.get_attr("element_dtype")).size


def _length(tensor: tf.Tensor) -> int:
    """The number of elements of a tensor list; 0 if it is unknown."""
    creator = root_of(tensor).op
    if creator.type == "TensorListFromTensor":
        return creator.inputs[0].shape[0] or 0
    if creator.type not in _LISTS:
        return 0
    known = tf.get_static_value(creator.inputs[1])
    return max(int(known), 0) if known is not None else 0


_THERE_ANYWAY = ("Const", "Placeholder", "ReadVariableOp", "ZerosLike")


def saved_buffers(
    graph: tf.Graph, seed: tf.Tensor, batch: Iterable[tf.Tensor], weights: Sequence[tf.Tensor]
) -> list[tuple[str, Bytes]]:
    """The buffers that operations before the backward pass create and operations of the backward pass read.

    An operation belongs to the backward pass if it depends on the gradient of the loss, and an output of the graph
    depends on it. Operations that read only the shape of a tensor, that are recomputed from an earlier tensor, or whose
    result is unused therefore save nothing. Variables and the batch stay in memory anyway, and are not counted.

    Args:
        graph: A forward pass, its loss and the gradients, which are its outputs.
        seed: The gradient of the loss, where the backward pass begins.
        batch: The inputs of the graph that hold the batch.
        weights: The handles of the trained variables in the graph.

    Returns:
        The name of the operation that created each, and its bytes. Copies hold only weights.
    """
    backward = depending({seed.op}) & needed({one.op for one in graph.outputs})
    of_batch = {one.ref() for one in batch}
    fed_by_batch = depending({one.op for one in batch})
    handles = {one.ref() for one in weights}
    found: dict[object, tuple[str, Bytes]] = {}
    for operation in graph.get_operations():
        if operation not in backward:
            continue
        for tensor in operation.inputs:
            if tensor.op in backward or tensor.dtype == tf.resource:
                continue
            root = root_of(tensor)
            key = _key(root)
            if key in found or root.ref() in of_batch or root.op.type in _THERE_ANYWAY:
                continue
            origins = _origins(root.op)
            if origins:  # Without an origin it is a constant.
                copies = root.op not in fed_by_batch and all(
                    one.type in READS and one.inputs[0].ref() in handles for one in origins
                )
                size = bytes_of(root)
                kind = "uncounted" if size is None else "copies" if copies else "activations"
                found[key] = root.op.name, Bytes(**{kind: 1 if size is None else size})
    return list(found.values())


def _key(root: tf.Tensor) -> object:
    """The identity of a buffer: casts of one tensor to one dtype share it, since the graph optimizer merges them."""
    if root.op.type != "Cast":
        return root.ref()
    source = root_of(root.op.inputs[0])
    if source.op.type == "ReadVariableOp":
        return ("Cast", source.op.inputs[0].ref(), root.dtype)
    return ("Cast", source.ref(), root.dtype)


def _origins(operation: tf.Operation) -> list[tf.Operation]:
    """The sources of an operation's data: reads of variables, inputs of the graph, random numbers."""
    return [one for one in needed({operation}) if one.type in READS or (not one.inputs and not _is_constant(one))]


def _is_constant(operation: tf.Operation) -> bool:
    return operation.type == "Const" or any(one.dtype == tf.resource for one in operation.outputs)
