"""Counts the bytes of a training step under the model's own dtype policy and under others."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.models import POLICIES, following, loss_in_float32, own_policy, under
from loops.diagnose.memory.activations import SavedTensors, saved_tensors
from loops.diagnose.memory.footprint import Bytes, Footprint, total
from loops.diagnose.memory.recompute import blocks_of, checkpointed


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


_HALF = ("float16", "bfloat16")


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
    slots = slot_values(model, optimizer)
    own = own_policy(model)
    return [
        _footprint(model, loss, batch, slots, policy, checkpointing, masters or policy != own)
        for policy in dict.fromkeys([own, *policies])
    ]


def _footprint(
    model: keras.Model,
    loss: Callable[..., Any],
    batch: Any,
    slots: Mapping[int, int] | None,
    policy: str,
    checkpointing: bool,
    masters: bool,
) -> Footprint:
    # 16-bit weights give the same computation as float32 weights under a mixed policy, without the casts.
    casts = policy != own_policy(model) and policy in _HALF
    traced_as = f"mixed_{policy}" if casts else policy
    with under(model, traced_as):
        saved = saved_tensors(model, loss_in_float32(loss), batch)
        recomputed = _recomputed(model, loss, batch, saved, not casts) if checkpointing and blocks_of(model) else None
    layers: dict[str | None, Bytes] = collections.defaultdict(Bytes)
    held = _held_by_layer(model, policy, slots, masters, saved)
    for place in dict.fromkeys([*held, *saved.activations, *saved.copies, *saved.uncounted]):
        layers[place] = dataclasses.replace(
            held.get(place, Bytes()),
            copies=0 if casts else saved.copies.get(place, 0),
            activations=saved.activations.get(place, 0),
            uncounted=saved.uncounted.get(place, 0),
        )
    return Footprint(policy, dict(layers), recomputed)


def _recomputed(model: keras.Model, loss: Callable[..., Any], batch: Any, plain: SavedTensors, copies: bool) -> int:
    """The bytes saved with gradient checkpointing, plus those of the largest block while it is recomputed."""
    with checkpointed(model):
        saved = saved_tensors(model, loss_in_float32(loss), batch)
    sizes = []
    for block in blocks_of(model):
        inside = {id(one) for layer in block for one in scaler.observe.layers_of(layer)}
        places = {plain.traced.place(call.layer) for call in plain.traced.calls if id(call.layer) in inside}
        sizes.append(sum(plain.activations.get(place, 0) for place in places))
    return sum(saved.activations.values()) + (sum(saved.copies.values()) if copies else 0) + max(sizes)


def _held_by_layer(
    model: keras.Model, policy: str, slots: Mapping[int, int] | None, masters: bool, saved: SavedTensors
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
            place = saved.traced.place(layer)
            found[place] = total([found.get(place, Bytes()), *rows])
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
