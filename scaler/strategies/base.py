"""What a strategy is: a pure state machine over scalar tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from scaler.errors import InvalidArgument


class Event(NamedTuple):
    """What one attempted step showed, the only thing a strategy sees of it.

    Attributes:
        finite: Scalar bool. True when every unscaled gradient and the squared global norm of all of them are finite
            in float32, which is when the step is applied.
    """

    finite: tf.Tensor


@runtime_checkable
class Strategy(Protocol):
    """Chooses the loss scale. Any frozen dataclass with these two methods is one.

    A state is a NamedTuple of scalar tensors with at least `loss_scale` (float32, in [2^-126, 2^126]). Both methods
    are pure: they create no variables and read nothing but their arguments, so that they give the same values in
    eager mode, in a `tf.function`, in a `tf.range` loop and under XLA, also elementwise on states of any one shape.

    It may have numbers `min_scale` and `max_scale`: a scale outside of them, or outside of [2^-126, 2^126] without
    them, is never used, wherever it comes from.
    """

    def init(self) -> Any:
        """The state before the first step."""
        ...

    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        ...


def check_strategy(strategy: object) -> None:
    """Refuses an object that is no strategy."""
    if isinstance(strategy, type) or not isinstance(strategy, Strategy):
        raise InvalidArgument(
            f"LossScaler({strategy!r}): expected a strategy such as scaler.Dynamic(), scaler.Static(1024.0) or "
            "scaler.NoScaling(), an object with init() and update(state, event)."
        )


def check_state(strategy: Strategy, state: Any) -> None:
    """Refuses a strategy whose state has no scalar loss scale."""
    loss_scale = getattr(state, "loss_scale", None)
    if not hasattr(state, "_asdict") or loss_scale is None or tf.convert_to_tensor(loss_scale).shape.rank != 0:
        raise InvalidArgument(
            f"{type(strategy).__name__}.init() returned {state!r}: expected a NamedTuple of scalar tensors with a "
            "field named loss_scale."
        )
