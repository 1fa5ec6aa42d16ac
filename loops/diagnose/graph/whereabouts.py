"""Records, while a step is traced, to which layer each of its operations belongs.

The measured output of one operation of a step, as plain values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loops.backend import steps
from loops.diagnose.graph.changes import patched, with_value
from loops.diagnose.graph.scaler_calls import count_of_operations, on_first_replica

_BACKWARD = "gradient_tape/"


class Whereabouts:
    """The layers of operations, by their number in the graph.

    Attributes:
        calls: For each call the layer's path, the number of its first operation, and of the first one after it.
        regularizers: The same for each call of a regularizer.
        customs: For each function with a custom gradient its name, the number of the last operation of its call, of the
            first operation of its backward pass, and of the first one after that.
        order: The layers' paths in the order in which their calls ended.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.regularizers: list[tuple[str, int, int]] = []
        self.customs: list[tuple[str, int, int, int]] = []

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

    def in_customs(self) -> dict[int, str]:
        """The name of the function with a custom gradient, by the numbers of the operations of that gradient."""
        # Inner ones end before outer ones.
        return {number: name for name, _, first, end in reversed(self.customs) for number in range(first, end)}

    def in_regularizers(self) -> set[int]:
        """The numbers of the operations that regularizers created."""
        return {number for _, first, end in self.regularizers for number in range(first, end)}


@contextlib.contextmanager
def recording_layers(layers: Mapping[str, keras.layers.Layer]) -> Iterator[Whereabouts]:
    """Records the calls of layers, of their regularizers and of custom gradients.

    Args:
        layers: The layers by path. Each is restored at the end.
    """
    found = Whereabouts()
    graphs: list[tf.Graph] = []
    with contextlib.ExitStack() as stack:
        for path, layer in layers.items():
            stack.enter_context(patched(layer, "call", _recording(path, layer.call, found.calls, graphs)))
        for owner, name, path in _regularized(layers):
            change = _Regularizer(_recording(path, getattr(owner, name), found.regularizers, graphs))
            stack.enter_context(with_value(owner, name, change))
        stack.enter_context(steps.custom_gradients(functools.partial(_recording_backward, found.customs, graphs)))
        yield found


class _Regularizer(keras.regularizers.Regularizer):
    """Wraps a function as a regularizer, since a variable accepts nothing else.

    Args:
        function: A function of the variable's value.
    """

    def __init__(self, function: Callable):
        self._function = function

    def __call__(self, value: Any) -> Any:
        """The penalty of a value."""
        return self._function(value)


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


def _recording(path: str, call: Callable, calls: list, graphs: list) -> Callable:
    @functools.wraps(call)  # Keras reads the signature.
    def record(*arguments: Any, **options: Any) -> Any:
        graph, first = tf.compat.v1.get_default_graph(), count_of_operations()
        graphs.append(graph)
        result = call(*arguments, **options)
        # A call inside another layer's loop counts as that layer.
        if graph is graphs[0] and on_first_replica():
            calls.append((path, first, count_of_operations()))
        return result

    return record


def _recording_backward(customs: list, graphs: list, name: str, backward: Callable) -> Callable:
    graph, last = tf.compat.v1.get_default_graph(), count_of_operations() - 1
    graphs.append(graph)

    def record(*grads: Any) -> Any:
        first = count_of_operations()
        result = backward(*grads)
        if graph is graphs[0] is tf.compat.v1.get_default_graph() and on_first_replica():
            customs.append((name, last, first, count_of_operations()))
        return result

    return record


def backward_layers(names: Sequence[str], forward: Sequence[str | None]) -> list[str | None]:
    """The layer of each operation, also in the backward pass, whose scopes TensorFlow names after the forward pass.

    Args:
        names: The names of all operations.
        forward: The layer of each operation, from `Whereabouts.by_number`.
    """
    scopes: dict[str, str | None] = {}
    for name, layer in zip(names, forward, strict=True):
        if layer is not None or not name.startswith(_BACKWARD):
            scopes.setdefault(_scope(name), layer)
    return [
        layer if layer is not None or not name.startswith(_BACKWARD) else _of_scope(name[len(_BACKWARD) :], scopes)
        for name, layer in zip(names, forward, strict=True)
    ]


def _scope(name: str) -> str:
    return name.rpartition("/")[0]


def _of_scope(name: str, scopes: Mapping[str, str | None]) -> str | None:
    scope = _scope(name)
    while scope:
        if scope in scopes:
            return scopes[scope]
        scope = _scope(scope)
    return None


class Part(enum.Enum):
    """The part of a step to which an operation belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Frame:
    """One floating-point or complex tensor of a step, or an integer one of its batch.

    Attributes:
        name: The tensor's name, such as "dense/MatMul:0".
        kind: The type of its operation, such as "MatMul".
        dtype: The dtype, such as "float16".
        part: The part of the step that computed it.
        layer: The path of the layer that computed it, or None for the loss and the step itself.
        inputs: The names of the floating-point and complex tensors from which it was computed.
        amax: The largest magnitude, with infinity, without NaN; for complex values the larger of the two parts.
        has_nan: Whether it holds a NaN.
        source: "batch" or "variable" if it was not computed but read from there, else None.
        penalty: Whether a regularizer of the layer computed it.
        custom: The name of the function whose custom gradient computed it, or None.
        through: For a non-finite tensor, the names of the tensors behind its other inputs: those of a mask, variables
            that were not finite before the step, and the values that the step assigned to other variables.
        blind: Whether it is not finite and depends on what cannot be measured: a string, a table, an iterator.
    """

    name: str
    kind: str
    dtype: str
    part: Part
    layer: str | None
    inputs: tuple[str, ...]
    amax: float
    has_nan: bool
    source: str | None = None
    penalty: bool = False
    custom: str | None = None
    through: tuple[str, ...] = ()
    blind: bool = False

    @property
    def finite(self) -> bool:
        """Whether all of its values are finite."""
        return not self.has_nan and self.amax != float("inf")

    @property
    def problem(self) -> str:
        """Either "nan", if it holds a NaN, or "inf"."""
        return "nan" if self.has_nan else "inf"


def magnitude(values: Any) -> tuple[float, bool]:
    """The largest magnitude of an array, without NaN, and whether it holds a NaN.

    Args:
        values: A tensor or an array. Of complex numbers both parts count. The magnitude of an empty one is 0.
    """
    numbers = np.asarray(values).reshape(-1)
    if numbers.dtype.kind == "c":
        numbers = np.ascontiguousarray(numbers).view(numbers.real.dtype)
    # NumPy is slow with 16-bit floats, and float32 represents all of their values.
    narrow = numbers.dtype.itemsize <= 2
    sizes = np.abs(numbers.astype(np.float32 if narrow else np.result_type(numbers.dtype, np.float32)))
    return float(np.fmax.reduce(sizes, initial=0.0)), bool(np.isnan(np.max(sizes, initial=0.0)))
