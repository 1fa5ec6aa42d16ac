"""Where a Keras model can be cut into groups of layers, and the same model with the cuts made.

Which group reads each variable is found in a traced forward pass: a layer may read what another one owns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.autograph import no_autograph, with_user_autograph
from scaler.backend.graphs import reached
from scaler.backend.layers import layers_of
from scaler.backend.variables import parts_of
from scaler.errors import InvalidArgument
from scaler.layerwise.groups import Layerwise
from scaler.layerwise.rescaling import Rescale
from scaler.strategies import Strategy

OUTPUTS = "outputs"
"""The group next to the loss: what comes after the last cut."""
_READER = re.compile(r"halfstep_reader_(\d+)_")
_STOPS = ("StopGradient", "ZerosLike", "OnesLike")
"""Floating-point operations through which no gradient passes."""


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a layer: the calls it was computed from, and whether any of them has weights."""

    layer: Any
    sources: tuple[_Call, ...]
    upstream: frozenset[_Call] = frozenset()
    has_weights: bool = False

    def __post_init__(self) -> None:
        self.upstream = frozenset({self}).union(*(source.upstream for source in self.sources))
        # Those that can be trained, also if they are frozen now.
        own = any("float" in str(variable.dtype) for variable in getattr(self.layer, "variables", ()))
        self.has_weights = own or any(source.has_weights for source in self.sources)


def insert_rescales(
    model: keras.Model, after: Sequence[str], *, strategy: Strategy | Mapping[str, Strategy] | None = None
) -> tuple[keras.Model, Layerwise]:
    """The model with its gradients rescaled after some of its layers, and the `Layerwise` that owns the scales.

    A layer named in `after` ends a group: the layer and everything it was computed from, up to earlier cuts. What
    comes after the last cut is the group "outputs", whose scale holds from the model's outputs on.

    Gradients meet where a tensor was used twice, and can be added at one scale only. So after a layer is a cut point
    only if no weight before it has another way to the outputs: after the addition that ends a residual block, but not
    inside of it; inside of one of several towers, if it shares no layer with the others. For the same reason everything
    that reads a weight has to be in one group: which layers read it is found by tracing the model once.

    Args:
        model: A `keras.Sequential` that is built, or a functional model. Models among its layers count as one layer.
        after: Names of layers, in any order.
        strategy: As `Layerwise` takes it: one, or a dict of them by the names of groups or patterns of them.

    Returns:
        A new functional model of the same layers and so of the same weights, and the `Layerwise`. Its outputs and their
        masks are those of the model that was given. Train the new one and save the one that was given: the rescaling
        layers cannot be written to a `.keras` file.

    Raises:
        InvalidArgument: For a subclassed model or one that is not built, an unknown layer, a layer that is not a cut
            point, a weight that two groups read, a model that cannot be traced, and layers that add losses of their
            own, whose gradients would pass no rescale.
    """
    _check_model(model)
    if not isinstance(after, Iterable) or not all(isinstance(name, str) for name in after):
        raise InvalidArgument(f"insert_rescales(after={after!r}): expected a list of names of layers.")
    names = [after] if isinstance(after, str) else list(after)
    _check_names(model, names)
    calls: list[_Call] = []
    origin: dict[int, _Call] = {}
    tensors: list[Any] = []  # Their ids are compared, so they must live.
    rescales = {name: Rescale(name) for name in [OUTPUTS, *names]}

    def call(layer: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        result = layer(*args, **kwargs)
        made = list(filter(_has_gradient, keras.tree.flatten(result)))
        used = keras.tree.flatten((args, kwargs)) if made else []  # A mask is no way for a gradient.
        calls.append(_Call(layer, tuple(origin[id(x)] for x in used if id(x) in origin)))
        if layer.name in names:
            if not _has_gradient(result) or sum(one.layer is layer for one in calls) > 1:
                raise InvalidArgument(
                    f"after={layer.name!r}: the layer is called several times, or has several outputs, or one of "
                    "integers: expected one floating-point output to cut at."
                )
            result = rescales[layer.name](result)
            made = [result]
        for x in made:
            origin[id(x)] = calls[-1]
            tensors.append(x)
        return result

    inputs, outputs = _rebuild(model, call)
    leaves = {origin[id(x)] for x in keras.tree.flatten(outputs) if id(x) in origin}
    cuts = {one.layer.name: one for one in calls if one.layer.name in names}
    for name in names:
        _check_cut(name, cuts[name], calls, leaves)
    ends = keras.tree.map_structure(lambda x: rescales[OUTPUTS](x) if _has_gradient(x) else x, outputs)
    rebuilt = keras.Model(inputs, ends, name=model.name)
    rebuilt.supports_masking = model.supports_masking
    _check_losses(rebuilt)
    # Sets of cut points are nested or apart, so the larger one comes first and the smallest around a call is its group.
    ordered = sorted(names, key=lambda name: len(cuts[name].upstream), reverse=True)
    around = {one: [OUTPUTS, *(name for name in ordered if one in cuts[name].upstream)] for one in calls}
    parents = {name: around[cuts[name]][-2] for name in ordered}
    called = {name: [one.layer for one in calls if around[one][-1] == name] for name in [OUTPUTS, *ordered]}
    groups = _variables_by_group(rebuilt, rescales, called)
    _check_losses(rebuilt)  # Again, for those that were not added before the trace.
    layerwise = Layerwise(groups, parents=parents, strategy=strategy)
    for name, layer in rescales.items():
        layer.apply = functools.partial(layerwise.rescale, group=name)
    rebuilt.train_step = functools.partial(_refuse_fit, model.name)
    return rebuilt, layerwise


def _refuse_fit(name: str, data: object) -> None:
    raise InvalidArgument(
        f"fit: model {name!r} has layers of hs.layerwise.insert_rescales, whose scales nothing removes from the "
        "gradients in fit. Expected the model that was given to insert_rescales; train the rescaled one by "
        "hs.TrainStep(..., layerwise=layerwise)."
    )


def _rebuild(model: keras.Model, call: Callable) -> tuple[Any, Any]:
    """The inputs and outputs of the model's graph, built again by `call(layer, *args, **kwargs)` for every layer."""
    if isinstance(model, keras.Sequential):
        inputs = outputs = keras.Input(batch_shape=model.inputs[0].shape, dtype=model.inputs[0].dtype)
        for layer in model.layers:
            outputs = call(layer, outputs)
        return inputs, outputs
    copy = keras.models.clone_model(model, clone_function=lambda layer: layer, call_function=call)
    return copy.input, copy.output


def _has_gradient(result: Any) -> bool:
    return isinstance(result, keras.KerasTensor) and any(kind in str(result.dtype) for kind in ("float", "complex"))


def _check_cut(name: str, cut: _Call, calls: Sequence[_Call], leaves: set[_Call]) -> None:
    before = [one for one in cut.upstream if one is not cut and one.has_weights]
    for one in before:
        past = [user.layer.name for user in calls if one in user.sources and user not in cut.upstream]
        if past or one in leaves:
            where = f"layer {past[0]!r}" if past else "an output of the model"
            raise InvalidArgument(
                f"after={name!r}: no cut point. The output of {one.layer.name!r}, which comes before, also goes to "
                f"{where} without passing it, and gradients at two scales cannot be added. Cut where the ways have "
                "joined, such as after the addition that ends a residual block."
            )


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"insert_rescales({model!r}): expected a keras.Sequential or functional model.")
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise InvalidArgument(
                f"insert_rescales: {model.name!r} is not built: begin it with keras.Input(shape), or call it once."
            )
    elif not hasattr(model, "operations"):
        raise InvalidArgument(
            f"insert_rescales: {model.name!r} is a subclassed model, whose graph is not known: call "
            "layerwise.rescale(x, group) in its call method instead."
        )


def _check_names(model: keras.Model, names: Sequence[str]) -> None:
    known = [layer.name for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    known += [one.name for one in getattr(model, "operations", ()) if not isinstance(one, keras.layers.Layer)]
    for name in names:
        if name not in known or name == OUTPUTS or names.count(name) > 1:
            raise InvalidArgument(
                f"after={name!r}: expected names of layers, each once: {', '.join(map(str, known))}. The group "
                f"{OUTPUTS!r} is always there."
            )
    if not names:
        raise InvalidArgument("after=[]: expected at least one layer to cut after.")


def _check_losses(model: keras.Model) -> None:
    active = [one.name for one in model.layers if getattr(one, "activity_regularizer", None)]
    if model.losses or active:
        raise InvalidArgument(
            f"insert_rescales: {model.name!r} has regularizers or other losses of its own, whose gradients would pass "
            "no rescale. Use the optimizer's weight decay instead."
        )


def _variables_by_group(
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
    floats = (one for one in (*traced.variables, *model.variables) if "float" in str(one.dtype))
    variables = {id(replicas.native(one)): one for one in floats}
    keys = {id(part.handle): key for key, one in variables.items() for part in parts_of(one)}
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
        if len(places) == 1:
            groups[next(iter(places))].append(one)
        elif len(places) > 1 and key not in never_trained:
            (later, by_later), (earlier, by_earlier) = list(places.items())[:2]
            raise InvalidArgument(
                f"weight {getattr(one, 'path', one.name)!r} is used in group {earlier!r} by {by_earlier} and in "
                f"{later!r} by {by_later}: its gradients would be added at two scales. Choose cuts with all that use "
                "it on one side."
            )
    return groups


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

    def in_group(tensors: Iterable[tf.Tensor], group: str) -> list[tuple[Any, str]]:
        made_by = (one.op for one in tensors)
        return [(op, ends.get(op.name, group)) for op in made_by if op.type not in _STOPS]

    def sources(node: tuple[Any, str]) -> list[tuple[Any, str]]:
        return in_group((one for one in node[0].inputs if _carries_gradient(one)), node[1])

    for operation, group in reached(in_group(traced.outputs, ""), sources):
        for source in operation.inputs:
            if source.dtype == tf.resource and group:
                yield outside.get(source.ref()), group, operation


def _carries_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant


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
