"""Computes the columns of a trace from a visit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import scaler
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
    unscaled, largest = _unscaled(tuple(tensors))
    values = np.asarray(amax, np.float64)[:, unscaled]
    with np.errstate(divide="ignore"):
        octaves = largest - np.log2(np.where(np.isnan(values), np.inf, values))
    headroom = octaves.min(axis=1, initial=np.inf)
    return Margins(critical_scales(amax, loss_scale, tensors), headroom)


def columns_of(visit: Visit, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """The numbers of each step, by the names of the trace's columns; NaN where it was not measured."""
    columns = dict(visit.outputs)
    if tensors:
        amax, seen = visit.vectors["amax"], measured(visit)
        scale = visit.outputs.get("loss_scale", np.ones(len(amax)))
        critical, headroom = margins(amax[seen], scale[seen], tensors)
        for name, values in (("critical_low", critical.low), ("critical_high", critical.high), ("headroom", headroom)):
            columns[name] = np.full(len(amax), np.nan)
            columns[name][seen] = values
    return columns


def measured(visit: Visit) -> np.ndarray:
    """Bool [steps]: whether the probes looked at the step, rather than leaving it out by `every`."""
    found = (visit.vectors["amax"] != 0).any(axis=1)
    if "counts" in visit.vectors:
        # Where all values are 0, they are counted; at a step that is left out all counts are 0, too.
        found |= (visit.vectors["counts"][:, :, scaler.observe.ZERO] != 0).any(axis=1)
    return found


@functools.lru_cache(maxsize=8)
def _unscaled(tensors: tuple[Tensor, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Which tensors do not carry the loss scale, and log2 of the largest number of the format of each of these."""
    chosen = np.array([not tensor.carries_scale for tensor in tensors], bool)
    return chosen, np.log2([tensor.limits.max for tensor in tensors if not tensor.carries_scale])


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
