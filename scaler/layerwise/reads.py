"""Which group of layers reads each variable, found in a traced forward pass: a layer may read what another one owns."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.autograph import no_autograph, with_user_autograph
from scaler.backend.layers import layers_of
from scaler.errors import InvalidArgument
from scaler.layerwise.rescaling import Rescale

_READER = re.compile(r"halfstep_reader_(\d+)_")
_STOPS = ("StopGradient", "ZerosLike", "OnesLike")
"""Floating-point operations through which no gradient passes."""


def variables_by_group(
    model: keras.Model, rescales: Mapping[str, Rescale], called: Mapping[str, Sequence]
) -> dict[str, list]:
    """The variables whose gradients carry the scale of each group.

    A variable belongs to the group that reads it, whatever layer owns it. One that nothing reads has no gradient, and
    belongs to the group of its layer.

    Args:
        model: With the rescaling layers. It is traced once, in training mode, and not run.
        rescales: The layer that ends each group, by the group's name. What these apply is replaced.
        called: The layers, and operations that are none, that each group calls.

    Raises:
        InvalidArgument: If two groups use a variable that can be trained, or the model cannot be traced.
    """
    traced, ends = _trace(model, rescales)
    # Variables that no layer owns come after those of the model.
    variables = {id(replicas.native(one)): one for one in (*traced.variables, *model.variables)}
    keys = {id(handle): key for key, one in variables.items() for handle in _handles(one)}
    readers: dict[int, dict[str, str]] = {}
    for handle, group, operation in _reads(traced, ends):
        if id(handle) in keys:
            readers.setdefault(keys[id(handle)], {}).setdefault(group, _said(operation, model))
    owners: dict[int, dict[str, str]] = {}
    for group, layers in called.items():
        for layer in layers:
            for one in getattr(layer, "variables", ()):
                owners.setdefault(id(replicas.native(one)), {}).setdefault(group, f"layer {layer.name!r}")
    never_trained = _never_trained(model, variables)
    groups: dict[str, list] = {name: [] for name in called}
    for key, one in variables.items():
        places = readers.get(key) or owners.get(key, {})
        if len(places) == 1 and "float" in str(one.dtype):
            groups[next(iter(places))].append(one)
        elif len(places) > 1 and "float" in str(one.dtype) and key not in never_trained:
            raise InvalidArgument(_refusal(one, places))
    return groups


def _refusal(variable: Any, places: Mapping[str, str]) -> str:
    (later, by_later), (earlier, by_earlier) = list(places.items())[:2]
    return (
        f"weight {getattr(variable, 'path', variable.name)!r} is used in group {earlier!r} by {by_earlier} and in "
        f"{later!r} by {by_later}: its gradients would be added at two scales. Choose cuts with all that use it on one "
        "side."
    )


def _trace(model: keras.Model, rescales: Mapping[str, Rescale]) -> tuple[Any, dict[str, str]]:
    """The forward pass as a function, and the group that ends at each of these operations, by name."""
    ends: dict[str, str] = {}

    def end(x: tf.Tensor, group: str) -> tf.Tensor:
        marked = tf.identity(x)
        ends[marked.op.name] = group
        return marked

    for group, layer in rescales.items():
        layer.apply = functools.partial(end, group=group)
    specs = keras.tree.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), model.input)
    with _scoped(model.operations):
        try:
            traced = tf.function(
                no_autograph(lambda inputs: with_user_autograph(model)(inputs, training=True))
            ).get_concrete_function(specs)
        except Exception as error:
            raise InvalidArgument(
                f"insert_rescales: {model.name!r} could not be traced for inputs of its own shapes, so that it is not "
                f"known which group reads which weight: {type(error).__name__}: {error}"
            ) from error
    return traced, ends


def _reads(traced: Any, ends: Mapping[str, str]) -> Iterator[tuple[Any, str, Any]]:
    """What a function captured, the group whose gradients reach it, and the operation that reads it."""
    captured = traced.captured_inputs
    outside = {inner.ref(): outer for inner, outer in zip(traced.inputs[-len(captured) :], captured, strict=False)}
    waiting = [(tensor, "") for tensor in traced.outputs]
    seen = set()
    while waiting:
        tensor, group = waiting.pop()
        operation = tensor.op
        group = ends.get(operation.name, group)
        if (operation.name, group) in seen or operation.type in _STOPS:
            continue
        seen.add((operation.name, group))
        for source in operation.inputs:
            if source.dtype == tf.resource and group:
                yield outside.get(source.ref()), group, operation
            if source.dtype.is_floating or source.dtype.is_complex or source.dtype == tf.variant:
                waiting.append((source, group))


def _handles(variable: Any) -> list:
    """What graphs capture of a variable: one for each replica."""
    native = replicas.native(variable)
    return [part.handle for part in getattr(native, "values", (native,))]


def _never_trained(model: keras.Model, variables: Mapping[int, Any]) -> set[int]:
    """The keys of those that no layer would train if it were thawed."""
    frozen = [one for layer in layers_of(model) if not layer.trainable for one in layer.variables]
    return {key for key, one in variables.items() if not one.trainable} - {id(replicas.native(one)) for one in frozen}


@contextlib.contextmanager
def _scoped(operations: Iterable[keras.Operation]) -> Iterator[None]:
    """Has the graph's names tell which of these made an operation. Keras's own scopes leave out all but layers."""
    with contextlib.ExitStack() as stack:
        for number, operation in enumerate(operations):
            own = vars(operation).get("call")
            # Not assigned, since Keras looks at what is assigned to a layer.
            object.__setattr__(operation, "call", _in_scope(operation.call, f"halfstep_reader_{number}_"))
            if own is None:
                stack.callback(object.__delattr__, operation, "call")
            else:
                stack.callback(object.__setattr__, operation, "call", own)
        yield


def _in_scope(call: Callable, scope: str) -> Callable:
    @functools.wraps(call)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with tf.name_scope(scope):
            return call(*args, **kwargs)

    return scoped


def _said(operation: tf.Operation, model: keras.Model) -> str:
    found = _READER.search(operation.name)
    made_by = model.operations[int(found[1])] if found else model
    return f"{'layer' if isinstance(made_by, keras.layers.Layer) else 'operation'} {made_by.name!r}"
