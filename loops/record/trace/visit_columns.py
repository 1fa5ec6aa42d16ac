"""Computes the columns of a trace from a visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loops.loop.visit import Visit
from loops.record.columns import cause_names
from loops.record.trace.critical import Critical, critical_scales
from loops.record.trace.tensors import Tensor
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
    """The numbers of each step, by the names of the trace's columns; NaN where it was not measured."""
    columns = dict(visit.outputs)
    if tensors:
        amax = visit.vectors["amax"]
        critical, headroom = margins(amax, visit.outputs.get("loss_scale", np.ones(len(amax))), tensors)
        found = {"critical_low": critical.low, "critical_high": critical.high, "headroom": headroom}
        columns |= {name: np.where(measured(visit), values, np.nan) for name, values in found.items()}
    return columns


def measured(visit: Visit) -> np.ndarray:
    """Bool [steps]: whether the probes looked at the step, rather than leaving it out by `every`."""
    amax, counts = visit.vectors["amax"], visit.vectors.get("counts")
    # At a step that is left out all of it is 0, also the counts of zeros.
    found = (amax != 0).any(axis=1)
    return found if counts is None else found | counts.any(axis=(1, 2))


def causes_of(outputs: Mapping[str, np.ndarray], train_step: Any) -> list[str | None]:
    """Why each step was skipped, as names of `scaler.Cause`; all None unless the step is a `TrainStep`."""
    steps = len(next(iter(outputs.values())))
    if not isinstance(train_step, TrainStep):
        return [None] * steps
    return cause_names(outputs["cause"])


def skipped(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bool [steps]: attempted, and not applied."""
    steps = len(next(iter(outputs.values())))
    everything = np.ones(steps, bool)
    applied, attempted = outputs.get("applied", everything), outputs.get("attempted", everything)
    return np.asarray(attempted).astype(bool) & ~np.asarray(applied).astype(bool)
