"""Checks of what `LossScaler.apply` is given, beside the gradients themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaler.errors import InvalidArgument
from scaler.gate.rollback import Snapshot


def check_apply(variables: Any, rollback: Any, functions: Mapping[str, Any], unscaled: Any) -> None:
    """Refuses arguments that cannot work.

    Args:
        variables: What the gradients belong to.
        rollback: A snapshot, or None.
        functions: The arguments `diagnose` and `again`, by name: functions, or None.
        unscaled: False, or whether the gradients are unscaled already.

    Raises:
        InvalidArgument: For the first that cannot.
    """
    if rollback is not None and not isinstance(rollback, Snapshot):
        raise InvalidArgument(
            f"apply(rollback={type(rollback).__name__}): expected scaler.snapshot(model.non_trainable_variables), "
            "taken before the forward pass, or None."
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InvalidArgument(f"apply({name}={function!r}): expected a function of a scalar tensor, or None.")
    if functions["again"] is not None and unscaled is not False:
        raise InvalidArgument(
            "apply(again=..., unscaled=...): unscaled gradients cannot be taken again. Pass the scaled ones."
        )
    if variables is None:
        raise InvalidArgument(
            "apply(optimizer, grads): expected two lists, apply(optimizer, grads, variables). Pairs of a gradient "
            "and a variable are for optimizer.apply_gradients alone."
        )
