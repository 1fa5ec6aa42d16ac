"""Converts strategies to plain data for saved models, and back.

The methods of `LossScaleOptimizer` for code written for other versions of Keras.
"""

from __future__ import annotations

import dataclasses
import numbers
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaler import strategies
from scaler.errors import InvalidArgument
from scaler.gate.loss_scaler import LossScaler
from scaler.gradients.lists import Gradient
from scaler.strategies import NoScaling, Static, Strategy
from scaler.strategies.base import require_strategy
from scaler.strategies.spike_guard import unguarded


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


class LegacyNames:
    """The names of tf.keras 2, and those of Keras 3 for its own way of loss scaling."""

    loss_scaler: LossScaler
    loss_scale: Any
    scale_loss: Any
    apply_gradients: Any
    _by_hand: bool
    _unscaled: tf.Variable

    @property
    def dynamic_scale(self) -> tf.Tensor:
        """The same as `loss_scale`, under Keras 3's name."""
        return self.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(unguarded(self.loss_scaler.strategy), (Static, NoScaling))

    def get_scaled_loss(self, loss: Any) -> Any:
        """The same as `scale_loss`, under tf.keras 2's name.

        A function that returns a loss gives a function that returns the scaled loss.
        """
        return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Turns gradients of the scaled loss into gradients of the loss, in float32, as in tf.keras 2.

        In a graph `apply` knows them by what they are computed from. In eager mode it takes all gradients as unscaled
        until the next loss is scaled.
        """
        self._by_hand = True
        self._unscaled.assign(True)
        return self.loss_scaler.unscale(grads)

    def minimize(self, loss: Any, var_list: Sequence, tape: tf.GradientTape | None = None) -> tf.Variable:
        """Scales the loss, differentiates it and applies the gradients, as in tf.keras 2.

        Args:
            loss: A function that returns the loss, or the loss itself together with its `tape`.
            var_list: The variables to update.
            tape: The tape that recorded the loss, if the loss is a tensor.
        """
        if not callable(loss) and tape is None:
            raise InvalidArgument("minimize(loss, ...): a loss that is a tensor needs the tape that recorded it.")
        with tape or tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        return self.apply_gradients(zip(tape.gradient(scaled, var_list), var_list, strict=True))
