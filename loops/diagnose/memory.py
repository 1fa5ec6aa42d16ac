"""The memory of a training step, layer by layer, from its graph: variables, and tensors saved for the backward pass."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import native
from loops.diagnose.graph.changes import POLICIES, following, loss_in_float32, own_policy, patched, under
from loops.diagnose.graph.models import Traced, loss_of, recorded
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

    with explaining("doctor", model, given[0], given[1]):
        graph, calls = recorded(model, differentiate, given)
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


_HALF = ("float16", "bfloat16")
_FEWEST = 4
"""The fewest layers of a Sequential that are worth dividing into blocks."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The memory of a training step under one policy.

    Attributes:
        policy: The policy, such as "mixed_float16"; "float16" is counted with float32 masters.
        layers: The bytes of each layer, by its name, or by its path where several layers have that name; None stands
            for the loss and everything else.
        recomputed: The bytes of activations and copies with gradient checkpointing: those saved, plus those of the
            largest block while it is recomputed. None if the model has no blocks.
    """

    policy: str
    layers: Mapping[str | None, Bytes]
    recomputed: int | None = None

    @property
    def all(self) -> Bytes:
        """The sum over the layers."""
        return sum(self.layers.values(), Bytes())

    @property
    def total_recomputed(self) -> int | None:
        """The sum of all known bytes with gradient checkpointing; None if the model has no blocks."""
        whole = self.all
        if self.recomputed is None:
            return None
        return whole.total - whole.copies - whole.activations + self.recomputed

    def as_dict(self) -> dict:
        """The footprint as values for JSON."""
        whole = self.all
        sums = {**dataclasses.asdict(whole), "total": whole.total, "total_recomputed": self.total_recomputed}
        layers = [{"layer": name, **dataclasses.asdict(one)} for name, one in self.layers.items()]
        return {"policy": self.policy, **sums, "layers": layers}


def slot_values(model: keras.Model, optimizer: Any) -> Mapping[int, int] | None:
    """The number of values in the slots of each trained variable, by the variable's `id`.

    For each variable it builds a new copy of the optimizer, since an optimizer need not say to which variable a slot
    belongs. Variables that an optimizer has only once, such as `iterations`, are not counted.

    Args:
        model: A model that is built.
        optimizer: A Keras optimizer.

    Returns:
        None for an optimizer that is a function, or that cannot be created from its `get_config()`.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    try:
        return {id(variable): _values(optimizer, variable) for variable in model.trainable_variables}
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return None


def copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A new optimizer of the same class and options, with the current learning rate and without state."""
    rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    return type(optimizer).from_config({**optimizer.get_config(), "learning_rate": rate})


def _values(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    copied = copy_of(optimizer)
    once = {id(one) for one in copied.variables}
    copied.build([variable])
    return sum(math.prod(one.shape) for one in copied.variables if id(one) not in once)


def footprints(
    model: keras.Model,
    loss: Callable[..., Any],
    batch: Any,
    optimizer: Any,
    *,
    policies: Sequence[str] = POLICIES,
    masters: bool = True,
    checkpointing: bool = True,
) -> list[Footprint]:
    """The memory of a training step, first under the model's own policy and then under others.

    The model is traced under each policy without being run, and is unchanged afterwards.

    Args:
        model: A model that is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        batch: `(x, y)` or `(x, y, sample_weight)`, of tensors.
        optimizer: A Keras optimizer, or a function of (grads, variables).
        policies: The policies to count besides the model's own.
        masters: Whether the model's own 16-bit weights have float32 masters.
        checkpointing: Whether to count gradient checkpointing as well.
    """
    slots, own, loss = slot_values(model, optimizer), own_policy(model), loss_in_float32(loss)
    blocks = blocks_of(model) if checkpointing else []
    found = []
    for policy in dict.fromkeys([own, *policies]):
        # 16-bit weights give the same computation as float32 weights under a mixed policy, without the casts.
        casts = policy != own and policy in _HALF
        again = Bytes()
        with under(model, f"mixed_{policy}" if casts else policy):
            saved, traced = saved_tensors(model, loss, batch)
            if blocks:
                with checkpointed(model):
                    again = sum(saved_tensors(model, loss, batch)[0].values(), again)
        layers = _held_by_layer(model, policy, slots, masters or policy != own, traced)
        for place, one in saved.items():
            kept = dataclasses.replace(one, copies=0) if casts else one
            layers[place] = layers.get(place, Bytes()) + kept
        largest = max((_activations_of(block, saved, traced) for block in blocks), default=0)
        recomputed = again.activations + (0 if casts else again.copies) + largest
        found.append(Footprint(policy, layers, recomputed if blocks else None))
    return found


def _activations_of(block: Sequence[keras.layers.Layer], saved: Mapping[str | None, Bytes], traced: Traced) -> int:
    inside = {id(one) for layer in block for one in scaler.observe.layers_of(layer)}
    places = {traced.place(call.layer) for call in traced.calls if id(call.layer) in inside}
    return sum(saved[place].activations for place in places if place in saved)


def _held_by_layer(
    model: keras.Model, policy: str, slots: Mapping[int, int] | None, masters: bool, traced: Traced
) -> dict[str | None, Bytes]:
    """The bytes of the variables and of the gradients, by layer."""
    change = {id(layer) for layer in following(model)} if policy != own_policy(model) else set()
    trained, seen = {id(one) for one in model.trainable_variables}, set()
    found: dict[str | None, Bytes] = {}
    for layer in reversed(scaler.observe.layers_of(model)):  # Innermost first: outer layers list the same variables.
        rows = []
        for variable in layer.variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            dtype = _dtype_under(variable.dtype, policy) if id(layer) in change else variable.dtype
            rows.append(_of_variable(variable, dtype, id(variable) in trained, slots, masters))
        if rows:
            place = traced.place(layer)
            found[place] = sum(rows, found.get(place, Bytes()))
    return dict(reversed(found.items()))


def _of_variable(variable: Any, dtype: str, trained: bool, slots: Mapping[int, int] | None, masters: bool) -> Bytes:
    values, size = math.prod(variable.shape), tf.as_dtype(dtype).size
    if not trained:
        return Bytes(weights=values * size)
    has_master = masters and dtype in _HALF
    return Bytes(
        weights=values * size,
        masters=4 * values if has_master else 0,
        slots=None if slots is None else slots.get(id(variable), 0) * (4 if has_master else size),
        gradients=values * size,
    )


def _dtype_under(dtype: str, policy: str) -> str:
    if not tf.as_dtype(dtype).is_floating:
        return dtype
    return policy if policy in _HALF else "float32"


def blocks_of(model: keras.Model) -> list[list[keras.layers.Layer]]:
    """The blocks that would be recomputed: each layer of the model that contains others, or parts of a Sequential.

    A Sequential of n layers is divided into about sqrt(n) blocks, which needs the least memory if all layers save about
    as much.

    Returns:
        A list of layers for each block; empty if no layer of the model contains others, so that the model has no
        natural blocks.
    """
    layers = [layer for layer in _held(model) if not isinstance(layer, keras.layers.InputLayer)]
    if isinstance(model, keras.Sequential) and len(layers) >= _FEWEST:
        size = math.ceil(len(layers) / math.isqrt(len(layers)))
        return [layers[start : start + size] for start in range(0, len(layers), size)]
    return [[layer] for layer in layers if len(scaler.observe.layers_of(layer)) > 1]


@contextlib.contextmanager
def checkpointed(model: keras.Model) -> Iterator[None]:
    """Recomputes the blocks of a model in the backward pass, with `tf.recompute_grad`.

    Use it for tracing only: a recomputed block draws new random numbers, as for Dropout, and updates its statistics
    twice.
    """
    in_parts = isinstance(model, keras.Sequential)
    layers = [model] if in_parts else [layer for (layer,) in blocks_of(model)]
    with scaler.authoring.calls_through(layers, _in_parts if in_parts else _recomputing):
        yield


def _held(model: keras.Model) -> list[keras.layers.Layer]:
    paths = scaler.observe.layers_by_path(model)
    return [layer for path, layer in paths.items() if "/" not in path and layer is not model]


def _in_parts(model: keras.Sequential, call: Callable, /, inputs: Any, training: Any = None, **options: Any) -> Any:
    for block in blocks_of(model):
        inputs = tf.recompute_grad(functools.partial(_through, block, training))(inputs)
    return inputs


def _through(block: list[keras.layers.Layer], training: bool | None, x: Any) -> Any:
    for layer in block:
        x = layer(x, training=training)  # Keras drops `training` if the layer does not accept it.
    return x


def _recomputing(layer: keras.layers.Layer, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
    def again(*tensors: Any) -> Any:
        given = iter(tensors)
        filled = tf.nest.map_structure(lambda one: next(given) if _flows(one) else one, (args, kwargs))
        # The layer itself casts inputs and weights. In the second call the outer call's `training` is lost.
        with patched(layer, "call", call):
            return layer(*filled[0], **{"training": True, **filled[1]})

    return tf.recompute_grad(again)(*(one for one in tf.nest.flatten((args, kwargs)) if _flows(one)))


def _flows(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating
