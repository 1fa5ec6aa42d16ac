"""Frozen weights that a user's own step reads, so that a loop can warn when they are unfrozen.

A `TrainStep` watches its model, and `LossScaler.apply` the variables of its snapshot. This is for steps without either.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import native
from loops.step.scalers_in_graph import captured

_MANY = 1000
"""A container of more parts holds data: containers in it are not searched, which would take seconds."""


def models_of(train_step: object) -> list[keras.layers.Layer]:
    """The models and layers that a step refers to, as `named_by` finds them.

    Args:
        train_step: Any callable.
    """
    return named_by(train_step, keras.layers.Layer)


def named_by(train_step: object, sought: type) -> list[Any]:
    """The objects of a class that a step refers to.

    They are found in its closure, as globals, as default arguments and as attributes of its object, also inside of
    dicts, lists and tuples. Functions of the same module that it refers to are searched, too. Other references are not
    found.

    Args:
        train_step: Any callable.
        sought: The class.
    """
    found: list[Any] = []
    seen: dict[int, object] = {}
    waiting: list[Any] = [train_step, *_attributes(train_step)]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, sought):
            found.append(one)
        elif isinstance(one, (dict, list, tuple)):
            parts = one.values() if isinstance(one, dict) else one
            held = (sought, dict, list, tuple) if len(one) <= _MANY else sought
            waiting += [part for part in parts if isinstance(part, held)]
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            waiting += [one.__func__, *_attributes(one.__self__)]
        elif isinstance(one, types.FunctionType):
            waiting += _named_by(one)
        elif isinstance(getattr(one, "python_function", None), types.FunctionType):
            waiting.append(one.python_function)
    return found


def read_only(
    models: list[keras.layers.Layer], concrete: tf.types.experimental.ConcreteFunction
) -> scaler.weights.TrainableSet:
    """The weights that a step reads and never assigns, each with whether it is trainable now.

    Args:
        models: The models that the step may use.
        concrete: The step's concrete function.
    """
    read = {id(variable) for variable, assigned in captured(concrete) if not assigned}
    weights = {id(weight): weight for model in models for weight in model.weights}
    return scaler.weights.TrainableSet.of(weight for weight in weights.values() if id(_first(weight)) in read)


def _attributes(owner: object) -> list[Any]:
    return list(getattr(owner, "__dict__", {}).values())


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    names = (function.__globals__.get(name) for name in _names(function.__code__))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in (*cells, *defaults, *names):
        if not isinstance(value, types.FunctionType) or value.__module__ == function.__module__:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _first(weight: Any) -> tf.Variable:
    """The TensorFlow variable of a Keras weight, on the first replica."""
    own = native(weight)
    return getattr(own, "values", (own,))[0]
