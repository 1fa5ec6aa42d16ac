"""What a train step is made of: its model, and the objects that own its variables."""

from __future__ import annotations

import inspect
from typing import Any

import keras

import scaler


def parts_of(train_step: Any) -> list[Any]:
    """The step's attributes, and what the code of a function names: models, optimizers, scalers, variables."""
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


def models_of(train_step: Any) -> list[keras.layers.Layer]:
    """The step's attribute `model` and the Keras models among its parts; layers, where there is no model."""
    parts = [getattr(train_step, "model", None), *parts_of(train_step)]
    parts += [one for part in parts if isinstance(part, (list, tuple)) for one in part]
    found = _outermost([one for one in parts if isinstance(one, keras.Model)])
    return found or _outermost([one for one in parts if isinstance(one, keras.layers.Layer)])


def _outermost(models: list) -> list:
    inside = {id(one) for model in models for one in scaler.observe.layers_of(model)[1:]}
    return list({id(one): one for one in models if id(one) not in inside}.values())


def optimizer_of(train_step: Any) -> keras.optimizers.Optimizer | None:
    """The step's Keras optimizer, or None."""
    parts = [getattr(train_step, "optimizer", None), *parts_of(train_step)]
    return next((one for one in parts if isinstance(one, keras.optimizers.Optimizer)), None)


def owned_by_parts(train_step: Any) -> set[int]:
    """The ids of the variables that belong to a model, an optimizer, a scaler or a metric of the step."""
    kinds = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, scaler.LossScaler)
    parts = [*models_of(train_step), optimizer_of(train_step), *parts_of(train_step)]
    variables = [variable for part in parts if isinstance(part, kinds) for variable in part.variables]
    variables += [one for part in parts if isinstance(part, scaler.MasterWeights) for one in part.weights]
    return {id(part) for variable in variables for part in (variable, getattr(variable, "value", variable))}
