"""Finds the parts of a train step: its models, its optimizer, the owners of its variables, its layers by path.

Runs a model, its layers or its loss in another dtype while a function is traced.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import in_policy
from loops.step.parts import parts_in


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


def optimizer_of(train_step: Any) -> keras.optimizers.Optimizer | None:
    """The step's Keras optimizer, or None."""
    parts = [getattr(train_step, "optimizer", None), *parts_of(train_step)]
    return next((one for one in parts if isinstance(one, keras.optimizers.Optimizer)), None)


def optimizers_of(train_step: Any, first: str | None = None) -> dict[str, keras.optimizers.Optimizer]:
    """The step's Keras optimizers by the name of their part; "" names that of a step without parts.

    Args:
        train_step: The step.
        first: The part whose optimizer comes first, or None.
    """
    if not parts_in(train_step):
        own = optimizer_of(train_step)
        return {} if own is None else {"": own}
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
    parts = [*models_in_step(train_step), optimizer_of(train_step), *parts_of(train_step)]
    if parts_in(train_step):
        parts += [*train_step.optimizers.values(), *train_step.scalers.values(), *train_step.master_weights]
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


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16")
"""The policies that are compared."""


def own_policy(model: keras.Model) -> str:
    """The policy of the layers with most of the weights. The model around them may have another one."""
    counted: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    for layer in reversed(scaler.observe.layers_of(model)):  # A variable belongs to the innermost layer that has it.
        own = [variable for variable in layer.variables if id(variable) not in seen]
        seen.update(map(id, own))
        counted[layer.dtype_policy.name] += sum(math.prod(variable.shape) for variable in own)
    return counted.most_common(1)[0][0]


def following(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers with the model's own policy, which would change with it. Others were given a policy explicitly."""
    own = own_policy(model)
    return [
        layer
        for layer in scaler.observe.layers_of(model)
        if layer.dtype_policy.name == own and not isinstance(layer, keras.layers.InputLayer)
    ]


@contextlib.contextmanager
def under(model: keras.Model, policy: str) -> Iterator[None]:
    """Runs a model under another policy; its variables keep their dtype.

    Args:
        model: The model. Layers that were given another policy keep it.
        policy: Keras's name of the policy; the model's own changes nothing.
    """
    if policy == own_policy(model):
        yield
        return
    with in_policy(following(model), policy):
        yield


def loss_in_float32(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that casts 16-bit predictions to float32 first, as if the model's last layer were in float32."""
    if isinstance(loss, keras.losses.Loss):
        return loss  # It casts by itself, and `TrainStep` handles it as a keras Loss.

    def wide(y: Any, prediction: Any, *weight: Any) -> Any:
        return loss(y, tf.nest.map_structure(_wide, prediction), *weight)

    return wide


def _wide(tensor: Any) -> Any:
    narrow = tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(tensor, tf.float32) if narrow else tensor


class _InFloat32(keras.DTypePolicy):
    """Computes in float32, with variables that keep their dtype."""

    def __init__(self, variable_dtype: str):
        super().__init__("float32")
        self._kept = variable_dtype

    @property
    def variable_dtype(self) -> str:
        """The variable dtype of the layer's own policy. Keras casts variables to float32 when the layer reads them."""
        return self._kept


@contextlib.contextmanager
def layers_in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Runs the float16 layers among these in float32 while a function is traced."""
    before = []
    try:
        for layer in layers:
            if layer.compute_dtype == "float16":
                before.append((layer, layer.dtype_policy))
                layer.dtype_policy = _InFloat32(layer.variable_dtype)
        yield
    finally:
        for layer, policy in reversed(before):
            layer.dtype_policy = policy
