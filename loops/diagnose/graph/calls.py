"""Records what a function calls while it is traced: layers, regularizers, custom gradients, and loss scalers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend import steps
from loops.diagnose.graph.changes import patched, with_value

BACKWARD = "gradient_tape/"


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: The layer.
        given: The positional and the keyword arguments.
        inside: The layers that called it, the outermost first.
        scope: The name scope of its operations.
        outputs: What it returned.
        graph: The graph in which it was called.
        first: The number of its first operation in the graph.
        end: The number of the first operation after it.
    """

    layer: keras.layers.Layer
    given: tuple[tuple, dict]
    inside: tuple[keras.layers.Layer, ...]
    scope: str
    outputs: Any
    graph: tf.Graph
    first: int
    end: int

    @property
    def signature(self) -> tuple[tuple, dict]:
        """The arguments with a `tf.TensorSpec` in place of each tensor."""
        return tf.nest.map_structure(spec_of, self.given)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The tensors among the arguments."""
        return [one for one in tf.nest.flatten(self.signature) if isinstance(one, tf.TensorSpec)]

    def again(self, tensors: Iterable) -> list[tf.Tensor]:
        """Calls the layer with other tensors, one for each of `specs`; returns the floating-point outputs."""
        rest = iter(tensors)
        args, kwargs = tf.nest.map_structure(
            lambda one: next(rest) if isinstance(one, tf.TensorSpec) else one, self.signature
        )
        outputs = tf.nest.flatten(self.layer(*args, **kwargs))
        return [one for one in outputs if tf.is_tensor(one) and one.dtype.is_floating]

    def differentiated(
        self, tensors: Sequence[tf.Tensor], weights: Sequence = (), seeds: Callable | None = None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Calls the layer as `again`; the outputs, and the gradients of its floating-point inputs and of `weights`.

        Args:
            tensors: As of `again`.
            weights: Variables of the layer.
            seeds: A function of an output that returns its gradient; default: ones.
        """
        watched = [one for one in tensors if one.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = self.again(tensors)
        given = None if seeds is None else [tf.cast(seeds(one), one.dtype) for one in outputs]
        zero = tf.UnconnectedGradients.ZERO
        return outputs, tape.gradient(outputs, [*watched, *weights], output_gradients=given, unconnected_gradients=zero)


def spec_of(value: Any) -> Any:
    """A `tf.TensorSpec` for a tensor; anything else as it is."""
    return tf.TensorSpec(value.shape, value.dtype) if tf.is_tensor(value) and hasattr(value, "shape") else value


@contextlib.contextmanager
def recording_calls(layers: Iterable[keras.layers.Layer], calls: list[LayerCall]) -> Iterator[None]:
    """Adds each call of these layers to a list when it returns. Of several replicas, the first one is recorded."""
    around: list[keras.layers.Layer] = []

    def record(layer: keras.layers.Layer, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
        graph, first = tf.compat.v1.get_default_graph(), count_of_operations()
        scope, inside = graph.get_name_scope(), tuple(around)
        around.append(layer)
        try:
            outputs = call(*args, **kwargs)
        finally:
            around.pop()
        if on_first_replica():
            end = count_of_operations()
            calls.append(LayerCall(layer, (args, kwargs), inside, scope, outputs, graph, first, end))
        return outputs

    with scaler.authoring.calls_through(layers, record):
        yield


def on_first_replica() -> bool:
    """Whether the first replica is being traced, or the only one."""
    context = tf.distribute.get_replica_context()
    return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0


def count_of_operations() -> int:
    """The number of operations so far in the graph that is being traced; 0 in eager mode."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


class Whereabouts:
    """The layers of operations, by their number in the graph of a step.

    Args:
        layers: The layers by path.

    Attributes:
        recorded: The calls of the layers.
        regularizers: For each call of a regularizer the layer's path, the number of its first operation, and of the
            first one after it.
        customs: For each function with a custom gradient its name, the number of the last operation of its call, of the
            first operation of its backward pass, and of the first one after that.
    """

    def __init__(self, layers: Mapping[str, keras.layers.Layer]) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._paths = {id(layer): path for path, layer in layers.items()}
        self.recorded: list[LayerCall] = []
        self.regularizers: list[tuple[str, int, int]] = []
        self.customs: list[tuple[str, int, int, int]] = []

    def count_here(self) -> int | None:
        """The number of operations so far; None in another graph than the step's, or on a further replica."""
        here = tf.compat.v1.get_default_graph() is self._graph and on_first_replica()
        return count_of_operations() if here else None

    @property
    def calls(self) -> list[tuple[str, int, int]]:
        """For each call the layer's path, the number of its first operation, and of the first one after it."""
        # A call inside another layer's loop counts as that layer.
        here = [call for call in self.recorded if call.graph is self._graph]
        return [(self._paths[id(call.layer)], call.first, call.end) for call in here]

    @property
    def order(self) -> list[str]:
        """The layers' paths in the order in which their calls ended, each once: inner layers before outer ones."""
        return list(dict.fromkeys(path for path, _, _ in self.calls))

    def by_number(self, count: int) -> list[str | None]:
        """The innermost layer of each operation of the forward pass or of a custom gradient; else None."""
        layers: list[str | None] = [None] * count
        # Outer calls end after inner ones, and must not hide them.
        for path, first, end in [*reversed(self.calls), *self.regularizers]:
            layers[first:end] = [path] * (end - first)
        for _, last, first, end in self.customs:
            layers[first:end] = [layer or layers[last] for layer in layers[first:end]]
        return layers

    def with_backward(self, names: Sequence[str]) -> list[str | None]:
        """The same of operations by name, also in the backward pass, whose scopes are named after the forward."""
        scopes: dict[str, str | None] = {}
        layers = self.by_number(len(names))
        for name, layer in zip(names, layers, strict=True):
            if layer is not None or not name.startswith(BACKWARD):
                scopes.setdefault(name.rpartition("/")[0], layer)
        for number, name in enumerate(names):
            if layers[number] is None and name.startswith(BACKWARD):
                parts = name.removeprefix(BACKWARD).split("/")
                around = ("/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
                layers[number] = next((scopes[scope] for scope in around if scope in scopes), None)
        return layers

    def in_customs(self) -> dict[int, str]:
        """The name of the function with a custom gradient, by the numbers of the operations of that gradient."""
        # Inner ones end before outer ones.
        return {number: name for name, _, first, end in reversed(self.customs) for number in range(first, end)}

    def in_regularizers(self) -> set[int]:
        """The numbers of the operations that regularizers created."""
        return {number for _, first, end in self.regularizers for number in range(first, end)}


@contextlib.contextmanager
def recording_layers(layers: Mapping[str, keras.layers.Layer]) -> Iterator[Whereabouts]:
    """Records the calls of layers, of their regularizers and of custom gradients, in the graph that is being traced.

    Args:
        layers: The layers by path. Each is restored at the end.
    """
    found = Whereabouts(layers)

    def recording_backward(name: str, backward: Callable) -> Callable:
        at = found.count_here()

        def record(*grads: Any) -> Any:
            first = found.count_here()
            result = backward(*grads)
            if at is not None and first is not None:
                found.customs.append((name, at - 1, first, count_of_operations()))
            return result

        return record

    with contextlib.ExitStack() as stack:
        stack.enter_context(recording_calls(layers.values(), found.recorded))
        for owner, name, path in _regularized(layers):
            stack.enter_context(with_value(owner, name, _Regularizer(getattr(owner, name), path, found)))
        stack.enter_context(steps.custom_gradients(recording_backward))
        yield found


class _Regularizer(keras.regularizers.Regularizer):
    """Calls another regularizer, and records it. A variable accepts no plain function.

    Args:
        function: A function of the variable's value.
        path: The path of the layer.
        found: Where the call is recorded.
    """

    def __init__(self, function: Callable, path: str, found: Whereabouts):
        self._function, self._path, self._found = function, path, found

    def __call__(self, value: Any) -> Any:
        """The penalty of a value."""
        first = self._found.count_here()
        result = self._function(value)
        if first is not None:
            self._found.regularizers.append((self._path, first, count_of_operations()))
        return result


def _regularized(layers: Mapping[str, keras.layers.Layer]) -> list[tuple[Any, str, str]]:
    """Each owner of a regularizer, the attribute's name, and the path of the innermost layer."""
    # A functional model also holds operations, such as keras.ops.exp, which have no variables and no regularizers.
    real = {path: layer for path, layer in layers.items() if isinstance(layer, keras.layers.Layer)}
    of_outputs = [(layer, path) for path, layer in real.items() if callable(layer.activity_regularizer)]
    owners: dict[int, tuple[Any, str]] = {}
    for path in sorted(real, key=len):
        variables = real[path].trainable_variables
        owners |= {id(one): (one, path) for one in variables if getattr(one, "regularizer", None) is not None}
    return [
        *((layer, "activity_regularizer", path) for layer, path in of_outputs),
        *((one, "regularizer", path) for one, path in owners.values()),
    ]


@dataclasses.dataclass
class ScalerCalls:
    """The recorded tensors, in the order of the calls. Of several replicas, the first one is recorded.

    Attributes:
        factor: See `recording_scaler_calls`, as `moves` and `nonzero`.
        moves: See there.
        nonzero: For each `apply` and `unscale` a float32 variable, one element for each gradient. The step assigns to
            it how many values of the gradient are not zero; infinities and NaN count, a variable's new value does not.
        losses: The unscaled losses.
        gradients: The scaled gradients of each `apply` and `unscale`.
        applied: The scaled gradients of each `apply` alone, None in the place of a variable's new value.
        finite: For each `apply` a scalar bool, whether it applied the gradients; on several replicas, one from each.
        owners: For each of these the scaler.
        moments: For each call, whether it took a loss, and the number of operations in the graph at that time.
    """

    factor: tf.Variable | tf.Tensor | None
    moves: bool
    nonzero: Sequence[tf.Variable]
    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[list] = dataclasses.field(default_factory=list)
    applied: list[list] = dataclasses.field(default_factory=list)
    finite: list[tf.Tensor] = dataclasses.field(default_factory=list)
    owners: list[scaler.LossScaler] = dataclasses.field(default_factory=list)
    moments: list[tuple[bool, int]] = dataclasses.field(default_factory=list)

    def losses_finite(self) -> list[tf.Tensor]:
        """A scalar bool for each loss, except for those inside an inner `tf.function`, which cannot be read."""
        here = tf.compat.v1.get_default_graph()
        return [tf.reduce_all(tf.math.is_finite(loss)) for loss in self.losses if loss.graph is here]

    def scale(self, original: Callable, loss: Any) -> tf.Tensor:
        """In place of a scaler's own."""
        if on_first_replica():
            self.moments.append((True, count_of_operations()))
            self.losses.append(tf.convert_to_tensor(loss))
        return original(loss if self.factor is None else tf.cast(loss, tf.float32) * self.factor)

    def unscale(self, original: Callable, grads: Sequence, variables: Any = None) -> list:
        """In place of a scaler's own."""
        grads = list(grads)
        self._take(grads, variables)
        return original(grads, variables)

    def apply(
        self, one: scaler.LossScaler, original: Callable, shares: Sequence[scaler.Share], **options: Any
    ) -> tuple[scaler.Outcome, list[scaler.Outcome]]:
        """In place of a scaler's own, for all replicas at once."""
        # Of a step that would take its gradients again the first ones are explained.
        options.pop("again", None)
        grads = [grad for share in shares for grad in share.grads]
        self.applied.append(self._take(grads, [weight for share in shares for weight in share.weights]))
        if self.moves:
            outcome, outcomes = original(shares, **options)
        else:
            outcome = _outcome_of_gradients(one, grads)
            outcomes = [outcome] * len(shares)
        self.finite.append(outcome.finite)
        self.owners.append(one)
        return outcome, outcomes

    def _take(self, grads: list, variables: Any) -> list:
        """Records gradients; returns them without new values, or all where the variables are unknown or do not fit."""
        known = variables.weights if isinstance(variables, scaler.MasterWeights) else variables
        fit = isinstance(known, Sequence) and len(known) == len(grads)
        derivatives = scaler.gradients.derivatives(grads, known) if fit else grads
        if on_first_replica():
            self.moments.append((False, count_of_operations()))
            place = len(self.gradients)
            if place < len(self.nonzero) and self.nonzero[place].shape == [len(grads)]:
                self.nonzero[place].assign([_nonzero(one) for one in derivatives])
            self.gradients.append(grads)
        return derivatives


def _nonzero(grad: Any) -> tf.Tensor:
    if grad is None:
        return tf.constant(0.0)
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return tf.cast(tf.math.count_nonzero(values), tf.float32)


def _outcome_of_gradients(one: scaler.LossScaler, grads: Sequence) -> scaler.Outcome:
    finite = scaler.gradients.all_finite([grad for grad in grads if grad is not None])
    cause = tf.where(finite, int(scaler.Cause.NONE), int(scaler.Cause.OVERFLOW))
    nan = float("nan")
    outcome = scaler.Outcome(finite, one.loss_scale, nan, tf.cast(cause, tf.int64), False, -1, clipped_norm=nan)
    # A step may return any field, and replicas put tensors together.
    return scaler.Outcome(
        *(tf.constant(one, tf.int64) if type(one) is int else tf.convert_to_tensor(one) for one in outcome)
    )


@contextlib.contextmanager
def recording_scaler_calls(
    scalers: Sequence[scaler.LossScaler],
    factor: tf.Variable | tf.Tensor | None = None,
    *,
    moves: bool = True,
    nonzero: Sequence[tf.Variable] = (),
) -> Iterator[ScalerCalls]:
    """Records the calls of the scalers' `scale`, `unscale` and `apply`.

    Args:
        scalers: The scalers of the step. Each is restored at the end.
        factor: Float32 scalar, a power of two, that multiplies each loss on its way into `scale`. It scales the
            gradients as a loss scale multiplied by it would, while the strategy's state stays the same.
        moves: Whether `apply` updates the weights. If False it only checks whether the gradients are finite, which
            makes tracing much faster: most of a step's graph is its update.
        nonzero: The variables that count non-zero values, see `ScalerCalls`.
    """
    calls = ScalerCalls(factor, moves, nonzero)
    with contextlib.ExitStack() as stack:
        for one in scalers:
            stack.enter_context(patched(one, "scale", functools.partial(calls.scale, one.scale)))
            stack.enter_context(scaler.authoring.apply_replaced(one, functools.partial(calls.apply, one)))
            stack.enter_context(patched(one, "unscale", functools.partial(calls.unscale, one.unscale)))
        yield calls
