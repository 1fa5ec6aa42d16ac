"""Traces a model and its loss once, and records the arguments of each layer call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import patched
from loops.support.batches import parts


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: The layer.
        args: The positional arguments, with a `tf.TensorSpec` in place of each tensor.
        kwargs: The keyword arguments, likewise.
        inside: The layers that called it, the outermost first.
        scope: The name scope of its operations.
        outputs: The tensors that it returned, in the traced graph.
    """

    layer: keras.layers.Layer
    args: tuple
    kwargs: dict
    inside: tuple[keras.layers.Layer, ...]
    scope: str
    outputs: list


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
    model_operations: frozenset[str]
    operations: list[tuple[str, str]]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Each layer that was called, once."""
        return list({id(call.layer): call.layer for call in self.calls}.values())

    def place(self, layer: keras.layers.Layer) -> str:
        """A layer's name, or its path where another layer has the same name."""
        namesakes = [one for one in self.layers if one.name == layer.name]
        return layer.name if len(namesakes) < 2 else layer.path or layer.name

    def place_of_node(self, node: str) -> str | None:
        """The innermost layer, or operation of a functional model, whose name scope contains the node."""
        around: list[tuple[str, Any]] = [(call.scope, call.layer) for call in self.calls] + self.operations
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
    x, y, weight = parts(sample, "lint")
    found: dict[str, Any] = {}

    def forward(x: Any, y: Any, weight: Any) -> tf.Tensor:
        prediction = model(x, training=True)
        made = tf.compat.v1.get_default_graph().get_operations()
        found["model_operations"] = frozenset(operation.name for operation in made)
        result = loss(y, prediction) if weight is None else loss(y, prediction, weight)
        found["predictions"] = [one for one in tf.nest.flatten(prediction) if tf.is_tensor(one)]
        found["loss"] = tf.convert_to_tensor(result[0] if isinstance(result, tuple) else result)
        return found["loss"]

    calls: list[LayerCall] = []
    operations: list[tuple[str, str]] = []
    with (
        _scoped(functional_operations(model), operations),
        recording_calls(scaler.observe.layers_of(model), calls),
        rounding_is_no_warning(),
    ):
        concrete = tf.function(forward).get_concrete_function(*tf.nest.map_structure(_spec, (x, y, weight)))
    return Traced(concrete.graph, calls, found["predictions"], found["loss"], found["model_operations"], operations)


def functional_operations(model: keras.Model) -> list[keras.Operation]:
    """The operations of functional models that are not layers, such as that of `keras.ops.log(x)`."""
    inside = [one for layer in scaler.observe.layers_of(model) for one in getattr(layer, "operations", ())]
    return list({id(one): one for one in inside if not isinstance(one, keras.layers.Layer)}.values())


@contextlib.contextmanager
def _scoped(operations: Iterable[keras.Operation], scopes: list[tuple[str, str]]) -> Iterator[None]:
    """Runs each operation in its own name scope, which Keras does for layers only, and adds the scope to a list."""
    with contextlib.ExitStack() as stack:
        for operation in operations:
            stack.enter_context(patched(operation, "call", _in_scope(operation, operation.call, scopes)))
        yield


def _in_scope(operation: keras.Operation, call: Callable, scopes: list[tuple[str, str]]) -> Callable:
    @functools.wraps(call)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with tf.name_scope(operation.name) as scope:
            scopes.append((scope.rstrip("/"), operation.name))
            return call(*args, **kwargs)

    return scoped


@contextlib.contextmanager
def rounding_is_no_warning() -> Iterator[None]:
    """Silences NumPy's warning about constants that overflow in float16: lint reports them as findings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning)
        yield


@contextlib.contextmanager
def recording_calls(layers: Iterable[keras.layers.Layer], calls: list[LayerCall]) -> Iterator[None]:
    """Adds each call of these layers to a list."""
    around: list[keras.layers.Layer] = []
    wrapped = []
    try:
        for layer in layers:
            own = vars(layer).get("call")
            wrapped.append((layer, own))
            layer.call = _recording(layer, layer.call, around, calls)
        yield
    finally:
        for layer, own in wrapped:
            if own is None:
                del layer.call
            else:
                layer.call = own


def _recording(
    layer: keras.layers.Layer, call: Callable, around: list[keras.layers.Layer], calls: list[LayerCall]
) -> Callable:
    def record(*args: Any, **kwargs: Any) -> Any:
        scope, inside = tf.compat.v1.get_default_graph().get_name_scope(), tuple(around)
        around.append(layer)
        try:
            outputs = call(*args, **kwargs)
        finally:
            around.pop()
        given, named = tf.nest.map_structure(_spec, (args, kwargs))
        calls.append(LayerCall(layer, given, named, inside, scope, tf.nest.flatten(outputs)))
        return outputs

    return record


def _spec(value: Any) -> Any:
    return tf.TensorSpec(value.shape, value.dtype) if tf.is_tensor(value) and hasattr(value, "shape") else value
