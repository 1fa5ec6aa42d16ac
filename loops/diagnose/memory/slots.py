"""How many values an optimizer keeps for each variable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras


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
