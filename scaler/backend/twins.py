"""A twin of an optimizer: its own arithmetic on tensors that stand in for one variable and the slots of that variable.

_get_variable_index       finds the slots of a variable     absent: small variables are not joined: slower, with the
_use_weight_decay         whether it decays a variable        same numbers
_distribution_strategy    runs the decay of a variable
_trainable_variables      how many slots there are
_var_key                  how it tells variables apart       may stand on the optimizer itself, as masters share keys
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.optimizers import built_for
from scaler.backend.versions import say_once

_NAMES = ("_get_variable_index", "_use_weight_decay", "_distribution_strategy")
_NOT_SLOTS = ("_trainable_variables", "_variables")
_CHANGES: dict[str, Callable[[tf.Tensor, Any], tf.Tensor]] = {
    "assign_add": lambda value, by: value + by,
    "assign_sub": lambda value, by: value - by,
}


class AssignableTensor:
    """A tensor that can be assigned: what an optimizer sees in the place of a variable. It lives while it is traced.

    Args:
        read: Returns the tensor. It is called if anybody asks for the value.
        dtype: That of the tensor.

    Attributes:
        only: The name of the method and its argument, if all that was done to it is one addition or subtraction.
        changes: How much was done to it.
    """

    def __init__(self, read: Callable[[], tf.Tensor], dtype: tf.DType):
        self._read, self.dtype = read, dtype
        self._value: tf.Tensor | None = None
        self.only: tuple[str, tf.Tensor] | None = None
        self.changes = 0

    @property
    def value(self) -> tf.Tensor:
        """The tensor, as it is now."""
        if self._value is None:
            before = self._read()
            self._value = before if self.only is None else _CHANGES[self.only[0]](before, self.only[1])
        return self._value

    def assign(self, value: tf.Tensor) -> None:
        """Takes another value."""
        self._value, self.only = tf.convert_to_tensor(value), None
        self.changes += 1

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to it."""
        self._change("assign_add", value)

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from it."""
        self._change("assign_sub", value)

    def _change(self, method: str, by: tf.Tensor) -> None:
        """Remembers a first addition or subtraction, and computes any other."""
        if self.changes or self._value is not None:
            self.assign(_CHANGES[method](self.value, by))
        else:
            self.only, self.changes = (method, tf.convert_to_tensor(by)), 1

    def __mul__(self, factor: Any) -> tf.Tensor:
        return self.value * factor

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype, name)


def can_have_twins(optimizer: Any) -> bool:
    """Whether Keras shows what a twin needs, of which it warns once if not, and all methods are those of the class.

    A method that somebody put on the optimizer itself works on that optimizer, and not on a twin.
    """
    for name in vars(optimizer):
        if name != "_var_key" and callable(getattr(type(optimizer), name, None)):
            return False
    gone = [name for name in _NAMES if not hasattr(optimizer, name)]
    if gone or built_for(optimizer) is None:
        say_once(
            f"have no {', '.join(gone) or _NOT_SLOTS[0]}: small variables are updated one by one. Slower, with the "
            "same numbers."
        )
        return False
    return True


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether the optimizer's weight decay applies to the variable.

    Keras asks of the TensorFlow variable, whose name is the path: that of a Keras variable is "kernel" in every layer.
    """
    return bool(optimizer.weight_decay) and bool(optimizer._use_weight_decay(replicas.native(variable)))


def slots_of(optimizer: Any, variable: Any) -> dict[str, tf.Variable]:
    """The slots of a variable by the names of the lists that hold them: for Adam `_momentums` and `_velocities`."""
    place, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
    slots = {}
    for name, found in vars(optimizer).items():
        is_a_list = isinstance(found, list) and len(found) == count and name not in _NOT_SLOTS
        # Keras counts every variable that an attribute holds among the optimizer's own.
        if is_a_list and isinstance(found[place], keras.Variable):
            slots[name] = found[place].value
    return slots


def twin(optimizer: Any, slots: Mapping[str, AssignableTensor], *, decaying: bool) -> Any:
    """An optimizer of the same class and settings, whose `update_step` moves these slots with any variable.

    Args:
        optimizer: It is left alone.
        slots: By the names of `slots_of`.
        decaying: Whether weight decay applies.
    """
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    vars(other).update({name: [slot] for name, slot in slots.items()})
    vars(other).update(
        _get_variable_index=lambda variable: 0,
        _use_weight_decay=lambda variable: decaying,
        _distribution_strategy=types.SimpleNamespace(extended=types.SimpleNamespace(update=_call)),
    )
    return other


def _call(variable: AssignableTensor, function: Callable, args: tuple = (), group: bool = False) -> None:
    """Updates a variable without a `tf.distribute` strategy."""
    del group
    function(variable, *args)
