"""The memory of a training step, layer by layer, under the model's own dtype policy and under others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import Traced
from loops.diagnose.graph.changes import POLICIES, following, loss_in_float32, own_policy, patched, under
from loops.diagnose.memory.saved import Bytes, saved_tensors

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
