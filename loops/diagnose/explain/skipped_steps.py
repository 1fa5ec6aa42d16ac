"""Which steps of a visit were skipped, and why, as far as the step's outputs and its scalers tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

import scaler
from loops.loop.visit import Visit

_NOT_OF_THE_SCALE = (scaler.Cause.LOSS, scaler.Cause.BACKWARD, scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
"""The causes that no loss scale cures. An OVERFLOW is how a scale finds its level."""


class SkippedStep(NamedTuple):
    """A step that was skipped.

    Attributes:
        step: Its number, from 1.
        cause: Why; OVERFLOW if nothing says more.
        variable: The position of the variable to look at first; -1 if it is unknown.
        updates: How many updates the weights had since; None if that is unknown.
        scales: The loss scale that it had, for each scaler for which it is known.
        is_told: Whether the step's outputs or its scaler say the cause and the variable.
    """

    step: int
    cause: scaler.Cause
    variable: int
    updates: int | None
    scales: tuple[tuple[scaler.LossScaler, float], ...]
    is_told: bool

    @property
    def kind(self) -> tuple[scaler.Cause, int] | None:
        """What makes two skips alike: their cause, and the variable, which belongs to a layer. None if it is unknown.

        Without these outputs only the last skip of a call is known by its scaler: the same fault earlier in a call
        would seem to be another one.
        """
        return (self.cause, self.variable) if self.is_told else None

    @property
    def is_to_be_explained(self) -> bool:
        """Whether no loss scale cures its cause.

        Steps that accumulate, that XLA compiles or that select new values only presume an OVERFLOW. At a scale of 1 or
        less it cannot be the scale's.
        """
        scales = [loss_scale for _, loss_scale in self.scales]
        at_most_one = bool(scales) and max(scales) <= 1.0
        return self.cause in _NOT_OF_THE_SCALE or (self.cause is scaler.Cause.OVERFLOW and at_most_one)


def skipped_steps(visit: Visit, scalers: Sequence[scaler.LossScaler]) -> list[SkippedStep]:
    """The skipped steps of a visit: those with the fewest updates since come first, and of these the earliest.

    A step that returns no `applied` is only known to be skipped if it is the last.

    Args:
        visit: The visit, of which the counters say that some step was skipped.
        scalers: The loss scalers of the step.
    """
    count = visit.counters.data - visit.first + 1
    attempted = visit.outputs.get("attempted", np.ones(count, bool)).astype(bool)
    decided = np.flatnonzero(attempted)
    if not len(decided):
        return []
    # Only the last decision is known to be a scaler's last skip.
    stuck = [one for one in scalers if int(one.counters.consecutive_skips)]
    applied = visit.outputs.get("applied")
    if applied is None:
        rows = [int(decided[-1])] if stuck else []
    else:
        rows = np.flatnonzero(attempted & ~applied.astype(bool)).tolist()
    found = [_step(visit, row, stuck if row == decided[-1] else [], scalers) for row in rows]
    return sorted(found, key=lambda one: (one.updates is None, one.updates, one.step))


def _step(
    visit: Visit, row: int, stuck: Sequence[scaler.LossScaler], scalers: Sequence[scaler.LossScaler]
) -> SkippedStep:
    outputs = visit.outputs
    last = [one.last_skip for one in stuck]
    scales = [(one, float(skip.loss_scale)) for one, skip in zip(stuck, last, strict=True)]
    if not stuck and "loss_scale" in outputs and len(scalers) == 1:
        scales = [(scalers[0], float(outputs["loss_scale"][row]))]
    causes, variables = _whole_numbers(outputs, "cause"), _whole_numbers(outputs, "variable")
    variable = int(last[0].variable) if last else -1
    return SkippedStep(
        visit.first + row,
        _cause(visit, row, [int(skip.cause) for skip in last]),
        variable if variables is None else int(variables[row]),
        _updates(outputs, row) if "applied" in outputs else 0 if stuck else None,
        tuple(scales),
        bool(last) or (causes is not None and variables is not None),
    )


def _whole_numbers(outputs: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """A column of the outputs; None if there is none of integers."""
    column = outputs.get(name)
    return column if column is not None and column.dtype.kind in "iu" else None


def _updates(outputs: Mapping[str, np.ndarray], row: int) -> int:
    """How many steps moved weights since; the step itself is one of them if another of its parts moved."""
    parts = [column for name, column in outputs.items() if name == "applied" or name.endswith("/applied")]
    return int(np.any(parts, axis=0)[row:].sum())


def _cause(visit: Visit, row: int, last: Sequence[int]) -> scaler.Cause:
    said = _whole_numbers(visit.outputs, "cause")
    known = [int(said[row])] if said is not None else list(last)
    known = [one for one in known if one in list(scaler.Cause) and one != scaler.Cause.NONE]
    loss = visit.outputs.get("loss")
    if not known and loss is not None and not np.isfinite(loss[row]):
        return scaler.Cause.LOSS
    return scaler.Cause(known[0]) if known else scaler.Cause.OVERFLOW
