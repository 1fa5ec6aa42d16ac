"""Checks the arguments of `LossScaleOptimizer`."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaler.backend.optimizers import is_of_keras_two
from scaler.backend.spelling import did_you_mean, from_keras
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


def check_inner(inner: object) -> None:
    """Refuses anything but a Keras optimizer that does not scale losses itself.

    Raises:
        InvalidArgument: With what was passed and what to pass.
    """
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


def check_strategy() -> None:
    """Refuses the `tf.distribute` strategies in whose scope no step is one step for all replicas.

    Raises:
        InvalidArgument: With those to use.
    """
    strategy, central = tf.distribute.get_strategy(), tf.distribute.experimental.CentralStorageStrategy
    several = isinstance(strategy, central) and strategy.num_replicas_in_sync > 1
    if several or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise InvalidArgument(
            f"LossScaleOptimizer under a {type(strategy).__name__}: its devices or workers share one copy of what each "
            "counts for itself, so that no step is applied or skipped as a whole. Expected a MirroredStrategy, a "
            "MultiWorkerMirroredStrategy, or a single device."
        )


def check_keras_arguments(given: dict, known: Iterable[str]) -> None:
    """Refuses arguments that would have no effect. Those of old configurations pass with the values that they hold.

    Raises:
        InvalidArgument: With the names of unknown arguments, or where one belongs.
    """
    unknown = {name: value for name, value in given.items() if name not in _IN_OLD_CONFIGS}
    if unknown:
        names, values = ", ".join(f"`{name}`" for name in unknown), ", ".join(map(repr, unknown.values()))
        end = did_you_mean(next(iter(unknown)), known)
        raise InvalidArgument(f"LossScaleOptimizer does not have the arguments: {names}; {values} was passed.{end}")
    for name, value in given.items():
        if name == "loss_scale_factor" and value is not None:
            raise InvalidArgument(
                f"LossScaleOptimizer(loss_scale_factor={value!r}): the wrapper scales losses by itself, and sets the "
                "factor on the `inner_optimizer` to None. For a constant scale leave it out and pass the strategy "
                f"hs.Static({value!r})."
            )
        if value != _IN_OLD_CONFIGS[name]:
            raise InvalidArgument(
                f"LossScaleOptimizer({name}={value!r}): the wrapper has no `{name}`. Set it on the `inner_optimizer`, "
                "where it works on unscaled gradients."
            )


def check_attribute(optimizer: Any, name: str, value: Any) -> None:
    """Refuses to set on the wrapper what only the optimizer inside has: it would have no effect.

    Raises:
        InvalidArgument: With what to set.
    """
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


def only_inner(inner: object, by_keras_name: object) -> Any:
    """Returns the optimizer to wrap, which Keras calls `inner_optimizer`; a name stands for Keras's with its defaults.

    Raises:
        InvalidArgument: If two were passed.
    """
    if inner is not None and by_keras_name is not None:
        raise InvalidArgument(
            f"LossScaleOptimizer({inner!r}, inner_optimizer={by_keras_name!r}): expected one optimizer; the first "
            "argument is the inner one."
        )
    return from_keras(keras.optimizers, by_keras_name if inner is None else inner)


def check_dynamic(dynamic: object) -> None:
    """Refuses anything but True.

    Raises:
        InvalidArgument: With what to pass for a scale that does not move.
    """
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


def check_name(name: object) -> None:
    """Refuses a name that is not a string.

    Raises:
        InvalidArgument: With what was passed.
    """
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"LossScaleOptimizer(name={name!r}): expected a string, or None.")


def chosen_strategy(
    strategy: Strategy | None, initial_scale: float | None, dynamic_growth_steps: int | None
) -> Strategy:
    """Returns the strategy, or the `Dynamic` that Keras's arguments configure.

    Raises:
        InvalidArgument: If both were passed, or `strategy` is not a strategy.
    """
    if strategy is None:
        default = Dynamic()
        return Dynamic(
            default.initial_scale if initial_scale is None else initial_scale,
            growth_interval=default.growth_interval if dynamic_growth_steps is None else dynamic_growth_steps,
        )
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
