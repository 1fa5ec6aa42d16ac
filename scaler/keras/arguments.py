"""How a `LossScaleOptimizer` is made: its arguments, where it is made and called, and its strategy in a saved model."""

from __future__ import annotations

import dataclasses
import numbers
import types
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaler import strategies
from scaler.backend import replicas
from scaler.backend.graphs import in_steps_of_fit, in_xla
from scaler.backend.optimizers import is_of_keras_two
from scaler.checks import did_you_mean, from_keras
from scaler.errors import InvalidArgument
from scaler.strategies import Dynamic, Strategy
from scaler.strategies.base import require_strategy

_IN_OLD_CONFIGS = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""What `get_config` of Keras's class holds before 3.12. Keras's class ignores these values."""
_NOTHING = object()


def only_inner(inner: object, by_keras_name: object) -> Any:
    """Returns the optimizer to wrap, Keras's `inner_optimizer`; a name stands for Keras's with its defaults."""
    if inner is not None and by_keras_name is not None:
        raise InvalidArgument(
            f"LossScaleOptimizer({inner!r}, inner_optimizer={by_keras_name!r}): expected one optimizer; the first "
            "argument is the inner one."
        )
    inner = from_keras(keras.optimizers, by_keras_name if inner is None else inner)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgument(
            f"LossScaleOptimizer({type(inner).__name__}): it scales losses by itself. Pass its inner_optimizer instead."
        )
    if is_of_keras_two(inner):
        raise InvalidArgument(
            f"LossScaleOptimizer({type(inner).__name__}): it is an optimizer of Keras 2, of the package tf-keras: "
            f"expected one of Keras 3, such as keras.optimizers.Adam(1e-3). In a train step of your own "
            "hs.LossScaler().apply(optimizer, grads, variables) takes it."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise InvalidArgument(
            f"LossScaleOptimizer({inner!r}): expected a Keras optimizer such as keras.optimizers.Adam(1e-3), or the "
            f"name of one such as 'adam'.{did_you_mean(inner, map(str.lower, dir(keras.optimizers)))}"
        )
    return inner


def check_strategy() -> None:
    """Refuses the `tf.distribute` strategies in whose scope no step is one step for all replicas."""
    strategy, central = tf.distribute.get_strategy(), tf.distribute.experimental.CentralStorageStrategy
    several = isinstance(strategy, central) and strategy.num_replicas_in_sync > 1
    if several or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise InvalidArgument(
            f"LossScaleOptimizer under a {type(strategy).__name__}: its devices or workers share one copy of what each "
            "counts for itself, so that no step is applied or skipped as a whole. Expected a MirroredStrategy, a "
            "MultiWorkerMirroredStrategy, or a single device."
        )


def check_keras_arguments(name: object, given: dict, known: Iterable[str]) -> None:
    """Refuses arguments that would have no effect. Those of old configurations pass with the values that they hold."""
    dynamic = given.pop("dynamic", True)
    if not isinstance(dynamic, (bool, np.bool_)):
        raise InvalidArgument(
            f"LossScaleOptimizer(dynamic={dynamic!r}): expected True. The second argument, a strategy, says how the "
            "scale moves: for example hs.Dynamic(initial_scale) or hs.Static(1024.0)."
        )
    if not dynamic:
        raise InvalidArgument(
            "LossScaleOptimizer(dynamic=False): for a constant scale pass the strategy hs.Static(1024.0). To scale "
            "without any check of the gradients, set `loss_scale_factor` on the optimizer and do not wrap it."
        )
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"LossScaleOptimizer(name={name!r}): expected a string, or None.")
    unknown = {name: value for name, value in given.items() if name not in _IN_OLD_CONFIGS}
    if unknown:
        names, values = ", ".join(f"`{name}`" for name in unknown), ", ".join(map(repr, unknown.values()))
        end = did_you_mean(next(iter(unknown)), known)
        raise InvalidArgument(f"LossScaleOptimizer does not have the arguments: {names}; {values} was passed.{end}")
    for argument, value in given.items():
        if argument == "loss_scale_factor" and value is not None:
            raise InvalidArgument(
                f"LossScaleOptimizer(loss_scale_factor={value!r}): the wrapper scales losses by itself, and sets the "
                "factor on the `inner_optimizer` to None. For a constant scale leave it out and pass the strategy "
                f"hs.Static({value!r})."
            )
        if value != _IN_OLD_CONFIGS[argument]:
            raise InvalidArgument(
                f"LossScaleOptimizer({argument}={value!r}): the wrapper has no `{argument}`. Set it on the "
                "`inner_optimizer`, where it works on unscaled gradients."
            )


def check_attribute(optimizer: Any, name: str, value: Any) -> None:
    """Refuses another optimizer inside, and to set on the wrapper what only that has: it would have no effect."""
    if name == "inner_optimizer" and value is not optimizer.inner_optimizer:
        raise InvalidArgument(
            f"LossScaleOptimizer.inner_optimizer = {type(value).__name__}: a compiled step would go on with the "
            f"{type(optimizer.inner_optimizer).__name__} that it was traced with. Expected a LossScaleOptimizer for "
            "each optimizer: make another one, and compile the model with it."
        )
    # Keras's class sets it on the optimizer that it wraps.
    if name == "loss_scale_factor":
        raise InvalidArgument(
            f"loss_scale_factor={value!r} on an hs.LossScaleOptimizer, or another loss scaler around it: it "
            "scales losses by itself. Expected one loss scaler; pass hs.Static(...) for a constant scale."
        )
    own = (
        name.startswith("_")
        or (name in vars(optimizer) and name not in _IN_OLD_CONFIGS)
        or hasattr(type(optimizer), name)
    )
    inside = name in _IN_OLD_CONFIGS or hasattr(optimizer.inner_optimizer, name)
    if not own and inside and value != _IN_OLD_CONFIGS.get(name, _NOTHING):
        raise InvalidArgument(
            f"{name}={value!r} on a LossScaleOptimizer: it would have no effect there. Set it on the optimizer that "
            f"moves the variables, `inner_optimizer.{name}`."
        )


def chosen_strategy(
    strategy: Strategy | None, initial_scale: float | None, dynamic_growth_steps: int | None
) -> Strategy:
    """Returns the strategy, or the `Dynamic` that Keras's arguments configure."""
    if strategy is None:
        given: dict[str, Any] = {"initial_scale": initial_scale, "growth_interval": dynamic_growth_steps}
        return Dynamic(**{name: value for name, value in given.items() if value is not None})
    if isinstance(strategy, numbers.Real):
        raise InvalidArgument(
            f"LossScaleOptimizer(inner, {strategy!r}): the second argument is the strategy. Expected "
            f"initial_scale={strategy!r} by name, or a strategy such as hs.Dynamic()."
        )
    require_strategy(strategy)
    if initial_scale is not None or dynamic_growth_steps is not None:
        raise InvalidArgument(
            f"LossScaleOptimizer(strategy={strategy!r}) together with initial_scale={initial_scale!r} and "
            f"dynamic_growth_steps={dynamic_growth_steps!r}: these two configure the default strategy. Pass them to "
            "the strategy, as hs.Dynamic(initial_scale, growth_interval=...)."
        )
    return strategy


def check_context() -> None:
    """Refuses gradients where no replica applies its own, and what Keras cannot do on several replicas."""
    if tf.distribute.in_cross_replica_context():
        raise InvalidArgument(
            "apply: called in the scope of a strategy, but outside of strategy.run(step, ...): expected a replica "
            "context, where each replica has its gradients."
        )
    if replicas.replica_count() == 1:
        return
    check_strategy()
    if in_steps_of_fit():
        raise InvalidArgument(
            "steps_per_execution > 1 on several replicas: Keras's loop over steps fails there with any optimizer. "
            "Pass steps_per_execution=1 to compile()."
        )
    if in_xla(if_unknown=False):
        raise InvalidArgument(
            "jit_compile=True on several replicas: XLA cannot compile a step with an all-reduce over replicas. "
            "Pass jit_compile=False to compile()."
        )


def check_scope(made_in: tf.distribute.Strategy, variables: Iterable) -> None:
    """Refuses variables that were made in the scope of another strategy than the optimizer."""
    for variable in variables:
        own = replicas.native(variable)
        other = own.distribute_strategy if isinstance(own, tf.distribute.DistributedValues) else None
        if other is not None and other is not made_in:
            raise InvalidArgument(
                f"LossScaleOptimizer: made outside of the scope of the {type(other).__name__} in which variable "
                f"{variable.name!r} was made. Create this optimizer and the inner one inside strategy.scope()."
            )


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
