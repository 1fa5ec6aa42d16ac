"""The bytes of a training step counted, under the model's own dtype policy and under others."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.policies import POLICIES, following, loss_in_float32, own_policy, under
from loops.diagnose.memory.activations import Kept, kept_by
from loops.diagnose.memory.footprint import Bytes, Footprint, total
from loops.diagnose.memory.recompute import blocks_of, checkpointed


def slot_values(model: keras.Model, optimizer: Any) -> Mapping[int, int] | None:
    """For each trained variable, by its `id`, the number of values in its slots.

    A copy of the optimizer is built for one variable after another, and thrown away: it need not say which slot is of
    which variable. What it keeps once, such as its iterations, is not counted.

    Args:
        model: Built.
        optimizer: A Keras optimizer.

    Returns:
        None for an optimizer that is a function, or that cannot be made again from its `get_config()`.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    try:
        return {id(variable): _values(optimizer, variable) for variable in model.trainable_variables}
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return None


def copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """An optimizer of the same class and options, with the learning rate of now and none of the state."""
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
    """What a training step holds under the model's own policy, and then under others.

    The model is traced under each; nothing is run, and nothing of it is changed afterwards.

    Args:
        model: Built.
        loss: As `TrainStep` takes it.
        batch: `(x, y)` or `(x, y, sample_weight)`, of tensors.
        optimizer: A Keras optimizer, or a function.
        policies: Those beside the model's own.
        masters: Whether the model's own 16-bit weights are trained through masters.
        checkpointing: Whether to count with gradient checkpointing, too.
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
    # With 16-bit weights the same is computed as with float32 ones that are cast, but for the casts.
    casts = policy != own_policy(model) and policy in _HALF
    traced_as = f"mixed_{policy}" if casts else policy
    with under(model, traced_as):
        kept = kept_by(model, loss_in_float32(loss), batch)
        recomputed = _recomputed(model, loss, batch, kept, not casts) if checkpointing and blocks_of(model) else None
    layers: dict[str | None, Bytes] = collections.defaultdict(Bytes)
    held = _held_by_layer(model, policy, slots, masters, kept)
    for place in dict.fromkeys([*held, *kept.activations, *kept.copies, *kept.uncounted]):
        layers[place] = dataclasses.replace(
            held.get(place, Bytes()),
            copies=0 if casts else kept.copies.get(place, 0),
            activations=kept.activations.get(place, 0),
            uncounted=kept.uncounted.get(place, 0),
        )
    return Footprint(policy, dict(layers), recomputed)


def _recomputed(model: keras.Model, loss: Callable[..., Any], batch: Any, plain: Kept, copies: bool) -> int:
    """Bytes of what is kept with checkpointing, and of the largest block while it is recomputed."""
    with checkpointed(model):
        kept = kept_by(model, loss_in_float32(loss), batch)
    sizes = []
    for block in blocks_of(model):
        inside = {id(one) for layer in block for one in scaler.observe.layers_of(layer)}
        places = {plain.traced.place(call.layer) for call in plain.traced.calls if id(call.layer) in inside}
        sizes.append(sum(plain.activations.get(place, 0) for place in places))
    return sum(kept.activations.values()) + (sum(kept.copies.values()) if copies else 0) + max(sizes)


def _held_by_layer(
    model: keras.Model, policy: str, slots: Mapping[int, int] | None, masters: bool, kept: Kept
) -> dict[str | None, Bytes]:
    """What is there before a step begins, and the gradients."""
    change = {id(layer) for layer in following(model)} if policy != own_policy(model) else set()
    trained, seen = {id(one) for one in model.trainable_variables}, set()
    found: dict[str | None, Bytes] = {}
    for layer in reversed(scaler.observe.layers_of(model)):  # The innermost first: theirs are their holders', too.
        rows = []
        for variable in layer.variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            dtype = _dtype_under(variable.dtype, policy) if id(layer) in change else variable.dtype
            rows.append(_of_variable(variable, dtype, id(variable) in trained, slots, masters))
        if rows:
            place = kept.traced.place(layer)
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
