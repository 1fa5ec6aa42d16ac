"""What `LossScaleOptimizer` may be made of."""

from __future__ import annotations

import numbers

import keras

from scaler.errors import InvalidArgument
from scaler.strategies import Dynamic, Strategy
from scaler.strategies.base import check_strategy


def check_inner(inner: object) -> None:
    """Refuses what is no Keras optimizer, or one that scales by itself.

    Raises:
        InvalidArgument: With what was passed and what to pass.
    """
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgument(
            f"LossScaleOptimizer({type(inner).__name__}): it scales losses by itself. Pass its inner_optimizer: one "
            "loss scaler is enough."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise InvalidArgument(
            f"LossScaleOptimizer({inner!r}): expected a Keras optimizer, such as keras.optimizers.Adam(1e-3)"
            + (f"; keras.optimizers.get({inner!r}) makes one of a name." if isinstance(inner, str) else ".")
        )


def chosen_strategy(
    strategy: Strategy | None, initial_scale: float | None, dynamic_growth_steps: int | None
) -> Strategy:
    """The strategy, or the `Dynamic` that Keras's arguments configure.

    Raises:
        InvalidArgument: For both, or what is no strategy.
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
            f"initial_scale={strategy!r} by name, or a strategy such as scaler.Dynamic()."
        )
    check_strategy(strategy)
    if initial_scale is not None or dynamic_growth_steps is not None:
        raise InvalidArgument(
            f"LossScaleOptimizer(strategy={strategy!r}) together with initial_scale={initial_scale!r} and "
            f"dynamic_growth_steps={dynamic_growth_steps!r}: these two configure the default strategy. Pass them to "
            "the strategy, as scaler.Dynamic(initial_scale, growth_interval=...)."
        )
    return strategy
