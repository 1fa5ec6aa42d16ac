"""Converts strategies to plain data for saved models, and back."""

from __future__ import annotations

import dataclasses
import numbers
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaler import strategies
from scaler.errors import InvalidArgument
from scaler.strategies import Strategy
from scaler.strategies.base import require_strategy


def to_config(strategy: Strategy) -> dict[str, Any]:
    """Converts a strategy to its class and its fields, as data for JSON.

    A class registered with `keras.saving.register_keras_serializable` is written by its own `get_config`. Any other
    frozen dataclass is written by its fields. A variable is written as its current value.

    Raises:
        InvalidArgument: If the strategy is neither, or a field is not a plain value.
    """
    kind: Any = type(strategy)
    registered = keras.saving.get_registered_name(kind)
    known = keras.saving.get_registered_object(registered) is kind
    if known:
        config = kind.get_config(strategy)
    elif dataclasses.is_dataclass(kind):
        fields = [field for field in dataclasses.fields(kind) if field.init]
        config = {field.name: _plain(strategy, field.name, getattr(strategy, field.name)) for field in fields}
    else:
        raise InvalidArgument(
            f"get_config: the strategy {strategy!r} is not a dataclass: expected a dataclass, or a class registered "
            "with @keras.saving.register_keras_serializable that has a get_config()."
        )
    return {
        "class_name": kind.__qualname__,
        "module": next((public.__name__ for public in _namespaces() if _named(kind.__name__, public) is kind), None),
        "registered_name": registered if known else None,
        "config": config,
    }


def from_config(config: dict[str, Any], custom_objects: dict | None = None) -> Strategy:
    """Makes the strategy that `to_config` wrote.

    Raises:
        InvalidArgument: If its class is not of this package, not registered and not in `custom_objects`.
    """
    kind = _find(config, custom_objects)
    if hasattr(kind, "from_config"):
        strategy = kind.from_config(config["config"])
    else:
        strategy = kind(**{name: _value(value, custom_objects) for name, value in config["config"].items()})
    require_strategy(strategy)
    return strategy


def _find(config: dict[str, Any], custom_objects: dict | None) -> Any:
    name, module, registered = config["class_name"], config["module"], config["registered_name"]
    for known in (registered, name):
        found = known and keras.saving.get_registered_object(known, custom_objects=custom_objects)
        if found:
            return found
    # Nothing is imported: a file must not choose which code runs.
    found = next((_named(name, public) for public in _namespaces() if public.__name__ == module), None)
    if dataclasses.is_dataclass(found):
        return found
    raise InvalidArgument(
        f"from_config: the saved optimizer uses the strategy {registered or name!r}, which is not known here. Import "
        "the module that registers it with @keras.saving.register_keras_serializable first, or load with "
        f"custom_objects={{{name!r}: {name}}}."
    )


def _namespaces() -> tuple[types.ModuleType, ...]:
    """The namespaces with the public names of this package's strategies."""
    # Few models are saved with a strategy of the last two, which would be half of `import scaler`.
    from scaler import layerwise
    from scaler.presets import rules

    return strategies, rules, layerwise


def _named(name: str, public: Any) -> Any:
    return getattr(public, name) if name in public.__all__ else None


def _plain(strategy: Strategy, name: str, value: Any) -> Any:
    if tf.is_tensor(value) or isinstance(value, (tf.Variable, np.generic, np.ndarray)):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_plain(strategy, name, entry) for entry in value]
    if isinstance(value, Strategy) and not isinstance(value, type):
        return to_config(value)
    raise InvalidArgument(
        f"get_config: {type(strategy).__name__}.{name}={value!r} cannot be saved: expected numbers, strings, tuples or "
        "strategies. Register the strategy's class with @keras.saving.register_keras_serializable and give it a "
        "get_config()."
    )


def _value(value: Any, custom_objects: dict | None) -> Any:
    if isinstance(value, list):
        return tuple(_value(entry, custom_objects) for entry in value)
    if isinstance(value, dict) and "class_name" in value:
        return from_config(value, custom_objects)
    return value
