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
from loops.step.watched import Watched, watched_by


class Margins(NamedTuple):
    """How far each step was from an overflow.

    Attributes:
        critical: From `critical_scales`.
        headroom: Float64 [steps]: octaves from the largest value that does not carry the scale to the largest number of
            its format; minus infinity if a value is infinite or NaN, NaN if none was measured or all are 0.
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
    nearest = octaves.min(axis=1, initial=np.inf)
    headroom = np.where(np.isposinf(nearest), np.nan, nearest)
    return Margins(critical_scales(amax, loss_scale, tensors), headroom)


def columns_of(visit: Visit, tensors: Sequence[Tensor], train_step: Any) -> dict[str, np.ndarray]:
    """The numbers of each step, by the names of the trace's columns; NaN where it was not measured.

    Of a `ComposedStep` with a scaler for each part there is no loss scale and so no critical one of the step. With one
    scaler there is none unless every part is measured, since any of them may overflow.
    """
    columns = dict(visit.outputs)
    parts = [part.name for part in train_step.parts] if isinstance(train_step, ComposedStep) else []
    if parts and train_step.loss_scaler is not None:
        columns["loss_scale"] = visit.outputs[f"{parts[0]}/loss_scale"]
    if tensors:
        amax, seen = joined(visit, "amax", train_step), any_measured(visit, train_step)
        scale = columns.get("loss_scale", np.ones(len(amax)))
        critical, headroom = margins(amax[seen], scale[seen], tensors)
        found = {"headroom": headroom}
        if not parts or ("loss_scale" in columns and set(parts) == {one.part for one in watched_by(train_step)}):
            found |= {"critical_low": critical.low, "critical_high": critical.high}
        for name, values in found.items():
            columns[name] = np.full(len(amax), np.nan)
            columns[name][seen] = values
    return columns


def joined(visit: Visit, output: str, train_step: Any) -> np.ndarray:
    """What the probes of all parts measured: [steps, tensors, ...], in the order of the tensors.

    Args:
        visit: A visit of the step.
        output: "amax" or "counts".
        train_step: The step, with probes.
    """
    found = [visit.vectors[one.output(output)] for one in watched_by(train_step)]
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def measured(visit: Visit, train_step: Any) -> np.ndarray:
    """Bool [steps, watches]: whether the probes of each watch looked at the step.

    They leave it out by `every`, and those of a part where it is not its turn.
    """
    return np.stack([_measured(visit.vectors, one) for one in watched_by(train_step)], axis=1)


def any_measured(visit: Visit, train_step: Any) -> np.ndarray:
    """Bool [steps]: whether the probes of any looked at the step."""
    return np.logical_or.reduce(measured(visit, train_step), axis=1)


def rows_measured(visit: Visit, train_step: Any) -> np.ndarray:
    """The same for each tensor: bool [steps, tensors]."""
    sizes = [visit.vectors[one.output("amax")].shape[1] for one in watched_by(train_step)]
    return np.repeat(measured(visit, train_step), sizes, axis=1)


def _measured(vectors: Mapping[str, np.ndarray], watched: Watched) -> np.ndarray:
    found = (vectors[watched.output("amax")] != 0).any(axis=1)
    if (counts := watched.output("counts")) in vectors:
        # Where all values are 0, they are counted; at a step that is left out all counts are 0, too.
        found |= (vectors[counts][:, :, scaler.observe.ZERO] != 0).any(axis=1)
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
