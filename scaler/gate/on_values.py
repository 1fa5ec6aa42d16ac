"""An optimizer's arithmetic as a function: from gradient, weight and slots to the weight and slots after the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend import apply_steps, optimizers, replicas
from scaler.backend.variables import assign_chosen, choose, flag_of, overwrites
from scaler.backend.versions import unsupported

_VALUE_BY_VALUE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)
"""By the very class: what a subclass does is its own. RMSprop is not here, because TensorFlow rounds a reciprocal
square root by where the value stands in its tensor."""


def works_on_values(optimizer: Any) -> bool:
    """Whether the optimizer treats every value by itself, so that `moved` is its own update of any variable."""
    return type(optimizer) in _VALUE_BY_VALUE and optimizers.can_have_twins(optimizer)


def is_value_by_value(optimizer: Any, variable: Any) -> bool:
    """Whether the variable is float32 and its slots are of its shape."""
    native = replicas.native(variable)
    if native.dtype != tf.float32 or overwrites(variable):
        return False
    return all(slot.shape == native.shape for slot in optimizers.slots_of(optimizer, native).values())


class Moved(NamedTuple):
    """What a step makes of a weight and its slots, by name."""

    weight: optimizers.AssignableTensor
    slots: dict[str, tf.Tensor]


def moved(
    optimizer: Any,
    decaying: bool,
    grad: tf.Tensor,
    weight: Callable[[], tf.Tensor],
    slots: Mapping[str, tf.Tensor],
    learning_rate: tf.Tensor,
) -> Moved:
    """The weight and its slots after a step.

    Args:
        optimizer: `works_on_values`.
        decaying: Whether its weight decay applies.
        grad: Unscaled and clipped, float32.
        weight: Returns it, float32 of the same shape. It is not called if the weight is only added to.
        slots: By the names of `optimizers.slots_of`, of the same shape.
        learning_rate: Scalar float32.
    """
    value = optimizers.AssignableTensor(weight, grad.dtype)
    held = {
        name: optimizers.AssignableTensor(functools.partial(_as_it_is, slot), slot.dtype)
        for name, slot in slots.items()
    }
    twin = optimizers.twin(optimizer, held, decaying=decaying)
    if decaying:
        getattr(type(twin), apply_steps.DECAY)(twin, [value])
        _check_moved(value, 0, apply_steps.DECAY)
    before = value.changes
    twin.update_step(grad, value, learning_rate)
    _check_moved(value, before, "update_step")
    return Moved(value, {name: slot.value for name, slot in held.items()})


def mover(optimizer: Any, learning_rate: tf.Tensor) -> Callable[[Sequence, Sequence], None]:
    """A function that moves variables by their finished gradients, where `assigned_where` says so.

    The arithmetic is traced once for all shapes of a rank and then called: Adam's has 30 operations for each variable.

    Args:
        optimizer: `works_on_values`.
        learning_rate: Scalar float32.
    """
    traced: dict[tuple, Callable] = {}

    def arithmetic(decaying: bool, rank: int, names: Sequence[str], flag: tf.Tensor | None) -> Callable:
        if (decaying, rank) not in traced:
            # Keras asks for the rank, to tell a bias from other tensors.
            any_shape = tf.TensorSpec([None] * rank, tf.float32)
            signature = [any_shape, any_shape, {name: any_shape for name in names}]

            @tf.function(autograph=False, input_signature=signature)
            def moved_once(grad: tf.Tensor, weight: tf.Tensor, slots: dict) -> tuple:
                after = moved(optimizer, decaying, grad, lambda: weight, slots, learning_rate)
                if flag is None:
                    return after.weight.value, after.slots
                chosen = {name: choose(flag, after.slots[name], before) for name, before in slots.items()}
                return choose(flag, after.weight.value, weight), chosen

            traced[decaying, rank] = moved_once
        return traced[decaying, rank]

    def move(grads: Sequence, variables: Sequence) -> None:
        for grad, variable in zip(grads, variables, strict=True):
            slots = optimizers.slots_of(optimizer, variable)
            decaying, rank = optimizers.decays(optimizer, variable), variable.shape.rank
            own = arithmetic(decaying, rank, list(slots), flag_of(variable))
            read = {name: tf.convert_to_tensor(slots[name]) for name in slots}
            weight, after = own(grad, tf.convert_to_tensor(variable), read)
            assign_chosen(variable, weight)
            for name, slot in slots.items():
                assign_chosen(slot, after[name])

    return move


def _as_it_is(value: tf.Tensor) -> tf.Tensor:
    return value


def _check_moved(weight: optimizers.AssignableTensor, before: int, name: str) -> None:
    if weight.changes == before:
        raise unsupported("apply", f"no longer moves a variable in the optimizer's {name}: nothing was changed.")
