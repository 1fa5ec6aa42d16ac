"""The update of variables whose slots are packed: one step of the optimizer on all of them, which XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.joining import flat
from scaler.masters import MasterWeights, refreshed, rounded_to
from scaler.optimizers import Optimizer
from scaler.packed import Packed


def update(
    slots: Packed,
    optimizer: Optimizer,
    pairs: Sequence[tuple],
    joined: tf.Tensor | None,
    masters: MasterWeights | None,
    finish: Callable,
    learning_rate: tf.Tensor,
) -> list:
    """Has the optimizer move the variables, after `slots.gather`.

    Args:
        slots: The optimizer's own.
        optimizer: Its updates treat every element by itself.
        pairs: Scaled gradients and their variables, these and others.
        joined: These gradients as one; None if `finish` does not do the same to all of them.
        masters: Those of the variables, or None. They take over what was assigned to the model first, and are rounded
            into it last.
        finish: Makes the gradient that the optimizer is to see of a scaled one and its variable.
        learning_rate: Scalar float32.

    Returns:
        The pairs of the others.
    """
    given = {id(variable): grad for grad, variable in pairs}
    own = [given.pop(id(weight)) for weight in slots.weights]
    rounded = masters.variables_of(slots.weights) if masters else []
    if masters and not rounded:
        masters.refresh(slots.weights)

    def seen(grads: list) -> tf.Tensor:
        return flat(list(map(finish, grads, slots.weights))) if joined is None else finish(*grads)

    grads = own if joined is None else [joined]
    if _adds_a_difference(optimizer) and not rounded:
        moved = _differences(slots, optimizer, grads, seen, learning_rate)
        for weight, difference in zip(slots.weights, slots.split(moved), strict=True):
            weight.assign_add(difference)
    else:
        moved, model = _values(slots, optimizer, grads, seen, rounded, learning_rate)
        if not slots.with_weights:
            for weight, value in zip(slots.weights, slots.split(moved), strict=True):
                weight.assign(value)
        for variable, value in zip(rounded, slots.split(model) if rounded else [], strict=True):
            variable.assign(value)
    if masters and not rounded:
        masters.write(slots.weights)
    slots.take_over(after=moved)
    return [pair for pair in pairs if id(pair[1]) in given]


def _adds_a_difference(optimizer: Optimizer) -> bool:
    """Whether what a step does to a variable is to add something that does not depend on its value."""
    return optimizer.weight_decay is None and not isinstance(optimizer, keras.optimizers.Ftrl)


def _differences(
    slots: Packed, optimizer: Optimizer, grads: list, seen: Callable, learning_rate: tf.Tensor
) -> tf.Tensor:
    """What is to be added to the weights, which need not be read for it."""

    @tf.function(jit_compile=True, autograph=False)
    def step(grads: list, learning_rate: tf.Tensor) -> tf.Tensor:
        differences = []

        def add(variable, value: tf.Tensor) -> None:
            if variable is slots.flat_weights:
                differences.append(value)
            else:
                variable.assign_add(value)

        twin = _twin(slots, optimizer)
        vars(twin).update(assign_add=add, assign_sub=lambda variable, value: add(variable, -value))
        twin.update_step(seen(grads), slots.flat_weights, learning_rate)
        (difference,) = differences
        return difference

    return step(grads, learning_rate)


def _values(
    slots: Packed, optimizer: Optimizer, grads: list, seen: Callable, rounded: list, learning_rate: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The new weights, which lie in their buffer already; and if they are masters the same rounded."""
    twin = _twin(slots, optimizer)
    decays = [bool(optimizer._use_weight_decay(target)) for target in slots.targets]

    @tf.function(jit_compile=True, autograph=False)
    def step(grads: list, weight: tf.Tensor | None, model: tf.Tensor | None, learning_rate: tf.Tensor) -> tuple:
        weight = slots.flat_weights.read_value() if weight is None else weight
        weight = weight if model is None else refreshed(weight, model)
        slots.flat_weights.assign(weight)
        if optimizer.weight_decay is not None:
            type(optimizer)._apply_weight_decay(twin, [slots.flat_weights])
            slots.flat_weights.assign(tf.where(tf.repeat(decays, slots.sizes), slots.flat_weights, weight))
        twin.update_step(seen(grads), slots.flat_weights, learning_rate)
        moved = slots.flat_weights.read_value()
        return moved, None if model is None else rounded_to(moved, model.dtype)

    weight = None if slots.with_weights else flat(slots.weights)
    return step(grads, weight, flat(rounded) if rounded else None, learning_rate)


def _twin(slots: Packed, optimizer: Optimizer) -> Any:
    """The optimizer, but for a single variable and its slots: the buffers."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), _get_variable_index=lambda _: 0, _use_weight_decay=lambda _: True)
    vars(twin).update({name: [buffer] for name, buffer in slots.buffers.items()})
    return twin
