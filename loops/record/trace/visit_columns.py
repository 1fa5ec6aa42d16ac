"""Computes the columns of a trace from a visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loops.loop.visit import Visit
from loops.record.columns import cause_names
from loops.record.trace.critical import Critical, critical_scales
from loops.record.trace.tensors import Tensor
from loops.step.composed_step import ComposedStep
from loops.step.train_step import TrainStep


class Margins(NamedTuple):
    """How far each step was from an overflow.

    Attributes:
        critical: From `critical_scales`.
        headroom: Float64 [steps]: octaves from the largest value that does not carry the scale to the largest number of
            its format; minus infinity if a value is infinite or NaN.
    """

    critical: Critical
    headroom: np.ndarray


def margins(amax: np.ndarray, loss_scale: np.ndarray, tensors: Sequence[Tensor]) -> Margins:
    """How far each step was from an overflow.

    Args:
        amax: Float [steps, tensors], the largest measured magnitudes.
        loss_scale: Float [steps].
        tensors: The measured tensors.
    """
    unscaled = [tensor for tensor in tensors if not tensor.carries_scale]
    largest = np.log2([tensor.limits.max for tensor in unscaled])
    values = np.asarray(amax, np.float64)[:, [not tensor.carries_scale for tensor in tensors]]
    with np.errstate(divide="ignore"):
        octaves = largest - np.log2(np.where(np.isnan(values), np.inf, values))
    headroom = octaves.min(axis=1, initial=np.inf)
    return Margins(critical_scales(amax, loss_scale, tensors), headroom)


def columns_of(visit: Visit, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """The numbers of each step, by the names of the trace's columns."""
    columns = dict(visit.outputs)
    if tensors:
        amax = visit.vectors["amax"]
        critical, headroom = margins(amax, visit.outputs.get("loss_scale", np.ones(len(amax))), tensors)
        columns |= {"critical_low": critical.low, "critical_high": critical.high, "headroom": headroom}
    return columns


def causes_of(outputs: Mapping[str, np.ndarray], train_step: Any) -> list[str | None]:
    """Why each step was skipped, as names of `scaler.Cause`; all None of a step that a user wrote."""
    steps = len(next(iter(outputs.values())))
    if not isinstance(train_step, (TrainStep, ComposedStep)):
        return [None] * steps
    return cause_names(outputs["cause"])


def skipped(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bool [steps]: attempted, and not applied."""
    steps = len(next(iter(outputs.values())))
    everything = np.ones(steps, bool)
    applied, attempted = outputs.get("applied", everything), outputs.get("attempted", everything)
    return np.asarray(attempted).astype(bool) & ~np.asarray(applied).astype(bool)
