"""The columns of a step, in a log and in a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaler

NUMBERS = ("loss", "loss_scale", "grad_norm", "clipped_norm", "critical_low", "critical_high", "headroom")
"""Columns of numbers."""
RETRIES = "retries"
"""How often a step took its gradients again: a column of numbers that only a log has."""
DECISIONS = ("attempted", "applied")
"""Columns of bools."""
_LONGEST_CAUSE = 40
"""An array of texts has room for the longest at each place, so that one long text would take all of the memory."""


def cause_name(value: Any) -> str:
    """The name of a `scaler.Cause`; "" if there is none.

    Args:
        value: A value of the column `cause`: the name, or the number that `Csv` and users' own programs write.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return scaler.Cause(value).name if value and value in list(scaler.Cause) else ""
    # A terminal obeys what cannot be printed.
    return value[:_LONGEST_CAUSE] if isinstance(value, str) and value.isprintable() else ""


def cause_names(values: np.ndarray) -> list[str | None]:
    """The name of each step's cause, or None for a step that was not skipped.

    Args:
        values: The output `cause` of a `TrainStep`, int64 [steps].
    """
    return [cause_name(value) or None for value in values.tolist()]


def octaves_to_critical(low: np.ndarray, high: np.ndarray, loss_scale: np.ndarray) -> np.ndarray:
    """Float64 [steps]: log2 of the critical scale over the loss scale; minus infinity where no scale is finite.

    Args:
        low: The column `critical_low`.
        high: The column `critical_high`, which counts where `low` is 0: the step was not finite.
        loss_scale: The column `loss_scale`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(np.where(low > 0, low, high)) - np.log2(loss_scale)
