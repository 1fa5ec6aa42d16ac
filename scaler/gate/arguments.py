"""Checks of what `LossScaler.apply` is given, beside the gradients themselves."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.gate.optimizers import check_optimizer
from scaler.gate.rollback import Snapshot
from scaler.gradients.clipping import ClipByNorm, ClipByValue, clipping_of


def check_arguments(
    optimizer: Any, *, clip_norm: float | tf.Tensor | None = None, clip: ClipByNorm | ClipByValue | None = None
) -> None:
    """Checks the arguments that `apply` would refuse at the first step.

    Raises:
        InvalidArgument: If `optimizer` is not an optimizer or scales losses itself, or the clipping is invalid.
    """
    check_optimizer(optimizer)
    clipping_of(clip_norm, clip)


def check_apply(
    grads: Any, variables: Any, rollback: Any, functions: Mapping[str, Any], unscaled: Any, update: bool
) -> None:
    """Refuses arguments that cannot work.

    Args:
        grads: The gradients, None with `again`.
        variables: What the gradients belong to.
        rollback: A snapshot, or None.
        functions: The arguments `diagnose` and `again`, by name: functions, or None.
        unscaled: False, or whether the gradients are unscaled already.
        update: Whether the strategy sees this step.

    Raises:
        InvalidArgument: For the first that cannot.
    """
    if rollback is not None and not isinstance(rollback, Snapshot):
        raise InvalidArgument(
            f"apply(rollback={type(rollback).__name__}): expected hs.snapshot(model.non_trainable_variables), "
            "taken before the forward pass, or None."
        )
    for name, function in functions.items():
        if function is not None and not _takes_one(function):
            raise InvalidArgument(f"apply({name}={function!r}): expected a function of a scalar tensor, or None.")
    if functions["again"] is not None:
        if grads is not None:
            raise InvalidArgument(
                "apply(grads, again=...): expected None for grads. `again` is called for them, with 1, so that the two "
                "cannot differ."
            )
        if unscaled is not False or not update:
            raise InvalidArgument(
                "apply(again=..., unscaled=... or update=False): a retry moves the scale at once, and takes scaled "
                "gradients. Do without `again` here."
            )
    if variables is None:
        raise InvalidArgument(
            "apply(optimizer, grads): expected two lists, apply(optimizer, grads, variables). Pairs of a gradient "
            "and a variable are for optimizer.apply_gradients alone."
        )


def _takes_one(function: Any) -> bool:
    """Whether it can be called with one argument, as far as Python shows it."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # It has no signature that Python could read.
    return True
