"""The parts of a program and its step: models, optimizers, layers by path; and a model and its loss as a graph."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import BACKWARD, LayerCall, recording_calls
from loops.diagnose.graph.changes import rounding_is_no_warning
from loops.loop.loop import Loop
from loops.step.parts import parts_in
from loops.step.train_step import TrainStep
from loops.support.batches import parts
from loops.support.errors import OutOfData


def parts_of(train_step: Any) -> list[Any]:
    """The step's attributes and the variables that its function uses: models, optimizers, scalers and others."""
    function = getattr(train_step, "python_function", train_step)
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function):
        owner, function = function, type(function).__call__
    named = list(getattr(owner, "__dict__", {}).values())
    try:
        variables = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:
        return named
    return [*named, *variables.nonlocals.values(), *variables.globals.values()]


def models_in_step(train_step: Any) -> list[keras.layers.Layer]:
    """The step's attribute `model` and the Keras models among its parts; its layers if there is no model."""
    parts = [getattr(train_step, "model", None), *parts_of(train_step)]
    parts += [one for part in parts if isinstance(part, (list, tuple)) for one in part]
    found = outermost([one for one in parts if isinstance(one, keras.Model)])
    return found or outermost([one for one in parts if isinstance(one, keras.layers.Layer)])


def outermost(models: Sequence[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """Those that are inside of no other, each once."""
    inside = {id(one) for model in models for one in scaler.observe.layers_of(model)[1:]}
    return list({id(one): one for one in models if id(one) not in inside}.values())


def optimizers_of(train_step: Any, first: str | None = None) -> dict[str, keras.optimizers.Optimizer]:
    """The step's Keras optimizers by the name of their part; "" names that of a step without parts.

    Args:
        train_step: The step.
        first: The part whose optimizer comes first, or None.
    """
    if not parts_in(train_step):
        parts = [getattr(train_step, "optimizer", None), *parts_of(train_step)]
        own = [one for one in parts if isinstance(one, keras.optimizers.Optimizer)]
        return {"": own[0]} if own else {}
    found = sorted(train_step.optimizers.items(), key=lambda item: item[0] != first)
    return {name: one for name, one in found if isinstance(one, keras.optimizers.Optimizer)}


def failed_part(train_step: Any, outputs: Mapping[str, Any]) -> str | None:
    """Which part of a `ComposedStep` was skipped first: that of the variable that it names, else the first skipped.

    Args:
        train_step: The step.
        outputs: The outputs of the step.

    Returns:
        Its name; None for a step without parts, or if no part was skipped.
    """
    left = int(outputs.get("variable", -1))
    for part in parts_in(train_step) if left >= 0 else ():
        if left < len(part.variables):
            return part.name
        left -= len(part.variables)

    def skipped(name: str) -> bool:
        return bool(outputs.get(f"{name}/attempted", True)) and not bool(outputs.get(f"{name}/applied", True))

    return next((part.name for part in parts_in(train_step) if skipped(part.name)), None)


def weights_in_step(train_step: Any, part: str | None = None) -> list[Any]:
    """The variables that a step trains.

    Args:
        train_step: The step.
        part: For a `ComposedStep`, of which part; None for all of them.
    """
    if parts := parts_in(train_step):
        return [one for own in parts if part in (None, own.name) for one in own.variables]
    found = [one for model in models_in_step(train_step) for one in model.trainable_variables]
    return list({id(one): one for one in found}.values())


def owned_by_parts(train_step: Any) -> set[int]:
    """The ids of the variables that belong to a model, an optimizer, a scaler or a metric of the step."""
    kinds = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, scaler.LossScaler)
    parts = [*models_in_step(train_step), *optimizers_of(train_step).values(), *parts_of(train_step)]
    if parts_in(train_step):
        parts += [*train_step.scalers.values(), *train_step.master_weights]
    variables = [variable for part in parts if isinstance(part, kinds) for variable in part.variables]
    variables += [one for part in parts if isinstance(part, scaler.MasterWeights) for one in part.weights]
    return {id(part) for variable in variables for part in (variable, getattr(variable, "value", variable))}


def paths_of(models: Sequence[keras.layers.Layer]) -> dict[str, keras.layers.Layer]:
    """Every layer by path, without models of Keras's own classes, which compute nothing themselves.

    If there are several models, each path begins with the model's name.
    """
    found: dict[str, keras.layers.Layer] = {}
    for model in models:
        prefix = f"{model.name}/" if len(models) > 1 else ""
        for path, layer in scaler.observe.layers_by_path(model).items():
            # Besides calling its layers, a model of Keras's own classes only casts its inputs.
            if layer is not model or not _is_of_keras(model):
                found[path if layer is model else prefix + path] = layer
    return found


def units(models: Sequence[keras.layers.Layer]) -> dict[str, keras.layers.Layer]:
    """The layers that get a dtype one by one: Keras's own layers as a whole, and each layer inside of others.

    A layer such as `MultiHeadAttention` is one unit, since its parts pass tensors to each other.
    """
    chosen: dict[str, keras.layers.Layer] = {}
    for path, layer in paths_of(models).items():
        inside = any(path.startswith(f"{other}/") and _is_of_keras(one) for other, one in chosen.items())
        if not inside and not isinstance(layer, keras.Model):
            chosen[path] = layer
    return chosen


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    return type(layer).__module__.startswith("keras.")


@dataclasses.dataclass(frozen=True)
class Traced:
    """A forward pass and its loss as a graph.

    Attributes:
        graph: The graph.
        calls: The layer calls in the order in which they returned: inner calls before outer ones.
        predictions: The model's outputs, tensors of the graph.
        loss: The loss, a tensor of the graph.
        model_operations: The names of the operations of the model, without those of the loss.
        operations: The name scope and the name of each operation of a functional model that is not a layer.
    """

    graph: tf.Graph
    calls: list[LayerCall]
    predictions: list[tf.Tensor]
    loss: tf.Tensor
    model_operations: frozenset[str] = frozenset()
    operations: Sequence[tuple[str, str]] = ()

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Each layer that was called, once."""
        return list({id(call.layer): call.layer for call in self.calls}.values())

    def inside(self, layer: keras.layers.Layer) -> list[keras.layers.Layer]:
        """The layers that a layer called, one for each call, inner ones first."""
        return [call.layer for call in self.calls if any(layer is around for around in call.inside)]

    def place(self, layer: keras.layers.Layer) -> str:
        """A layer's name, or its path where another layer has the same name."""
        namesakes = [one for one in self.layers if one.name == layer.name]
        return layer.name if len(namesakes) < 2 else layer.path or layer.name

    def place_of_node(self, node: str) -> str | None:
        """The innermost layer, or operation of a functional model, whose name scope contains the node."""
        node = node.removeprefix(BACKWARD)
        around: list[tuple[str, Any]] = [*((call.scope, call.layer) for call in self.calls), *self.operations]
        around = [(scope, one) for scope, one in around if scope and node.startswith(f"{scope}/")]
        if not around:
            return None
        innermost = max(around, key=lambda scoped: len(scoped[0]))[1]
        return innermost if isinstance(innermost, str) else self.place(innermost)


def trace(model: keras.Model, loss: Callable, sample: Any) -> Traced:
    """Traces a forward pass and the loss without running them.

    Args:
        model: A model that is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight).
        sample: A batch of tensors, `(x, y)` or `(x, y, sample_weight)`.
    """
    found: dict[str, Any] = {}

    def forward(x: Any, y: Any, weight: Any) -> tf.Tensor:
        prediction = model(x, training=True)
        made = tf.compat.v1.get_default_graph().get_operations()
        found["model_operations"] = frozenset(operation.name for operation in made)
        found["loss"] = tf.convert_to_tensor(loss_of(loss, prediction, y, weight))
        found["predictions"] = [one for one in tf.nest.flatten(prediction) if tf.is_tensor(one)]
        return found["loss"]

    def in_scope(operation: keras.Operation, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
        # Keras does so for layers only.
        with tf.name_scope(operation.name) as scope:
            operations.append((scope.rstrip("/"), operation.name))
            return call(*args, **kwargs)

    operations: list[tuple[str, str]] = []
    with scaler.authoring.calls_through(functional_operations(model), in_scope):
        graph, calls = recorded(model, forward, parts(sample, "lint"))
    return Traced(graph, calls, operations=operations, **found)


def recorded(model: keras.Model, function: Callable, given: Sequence) -> tuple[tf.Graph, list[LayerCall]]:
    """The graph of a function that calls a model, and the calls of its layers.

    Args:
        model: The model.
        function: The function.
        given: Its arguments: tensors, structures of them, or None.
    """
    calls: list[LayerCall] = []
    specs = tf.nest.map_structure(lambda one: tf.type_spec_from_value(one) if tf.is_tensor(one) else one, given)
    with recording_calls(scaler.observe.layers_of(model), calls), rounding_is_no_warning():
        return tf.function(function).get_concrete_function(*specs).graph, calls


def loss_of(loss: Callable, prediction: Any, y: Any, weight: Any) -> Any:
    """The loss of predictions, without what the function returns beside it."""
    result = loss(y, prediction) if weight is None else loss(y, prediction, weight)
    return result[0] if isinstance(result, tuple) else result


def derivatives_of(model: keras.Model, loss: Callable, sample: Any) -> list:
    """The gradients of the loss in float32, without those of variables that take a new value for one."""
    x, y, weight = parts(sample, "lint")
    with tf.GradientTape() as tape:
        value = tf.cast(loss_of(loss, model(x, training=True), y, weight), tf.float32)
    weights = model.trainable_variables
    found = scaler.gradients.derivatives(tape.gradient(value, weights), weights)
    return [one for one in found if one is not None]


def functional_operations(model: keras.Model) -> list[keras.Operation]:
    """The operations of functional models that are not layers, such as that of `keras.ops.log(x)`."""
    inside = [one for layer in scaler.observe.layers_of(model) for one in getattr(layer, "operations", ())]
    return list({id(one): one for one in inside if not isinstance(one, keras.layers.Layer)}.values())


def first_batch(sample: Any, who: str) -> Any:
    """The first batch of a dataset, or the next one of an iterator; anything else as it is.

    Raises:
        OutOfData: If the dataset is empty.
    """
    batch = next(iter(sample), None) if isinstance(sample, (tf.data.Dataset, Iterator)) else sample
    if batch is None and sample is not None:
        raise OutOfData(f"{who}: the dataset is empty.")
    return batch


_PARTS = ("model", "optimizer", "loss", "sample")


def taken_apart(built: Any, name: str) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loss and sample of the program that a user's function returned.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`, which stands for its optimizer, and its dataset for the sample;
            or a tuple, or a dict with these keys.
        name: The name of the function, for errors.

    Raises:
        scaler.InvalidArgument: For anything else.
    """
    if isinstance(built, Loop):
        step = built.train_step
        if isinstance(step, TrainStep):
            return step.model, step, step.loss_fn, built.position.dataset
        raise scaler.InvalidArgument(
            f"{name}: it returned a Loop whose train step is {step!r}, so its model and loss are unknown: expected an "
            "hs.TrainStep, or return (model, optimizer, loss, sample)."
        )
    if isinstance(built, Mapping) and set(built) == set(_PARTS):
        return built["model"], built["optimizer"], built["loss"], built["sample"]
    if isinstance(built, tuple) and len(built) == len(_PARTS):
        return built
    raise scaler.InvalidArgument(
        f"{name}: it returned {type(built).__name__}: expected an hs.Loop, or a tuple or dict of {', '.join(_PARTS)}."
    )
