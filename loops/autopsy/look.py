"""Looks at one step: where its trouble began, what scale fits it, and what helps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras

import scaler
from loops.autopsy.attempts import Attempt, Attempts
from loops.autopsy.course import tried_from_checkpoint
from loops.autopsy.explanation import Explanation, Magnitude
from loops.autopsy.frames import Frame, Part
from loops.autopsy.models import model_of
from loops.autopsy.origin import origins, pass_of
from loops.autopsy.paths import paths_of
from loops.autopsy.remedies import Remedy, fitting_scale, proposals, tried
from loops.autopsy.scan import Scan, scan
from loops.autopsy.sentence import sentence
from loops.autopsy.wider import in_float32, octaves_over
from loops.step.train_step import TrainStep

_VERDICTS = {
    scaler.Cause.NONE: "healthy",
    scaler.Cause.LOSS: "loss",
    scaler.Cause.BACKWARD: "backward",
    scaler.Cause.OVERFLOW: "overflow",
    scaler.Cause.TOO_LARGE: "too_large",
    scaler.Cause.UPDATE: "update",
}


def look(moment: Any, progress: Callable[[], None] = lambda: None) -> Explanation:
    """Explains the step that a `Moment` stands before.

    Args:
        moment: From `rewind`.
        progress: Called before each attempt.
    """
    attempts = Attempts(moment, progress)
    model = model_of(moment.train_step)
    layers = paths_of(model) if model is not None else {}
    attempt = attempts.take()
    seen = _scanned(attempts, layers)
    explanation = _began(moment, attempts, layers, attempt, seen)
    return dataclasses.replace(explanation, sentence=sentence(explanation))


def _began(
    moment: Any, attempts: Attempts, layers: Mapping[str, keras.layers.Layer], attempt: Attempt, seen: Scan
) -> Explanation:
    scale = _loss_scale(attempts, attempt)
    cause = _cause(attempts, attempt)
    known = Explanation(
        step=moment.step,
        reproduced=moment.reproduced,
        differs=moment.differs,
        verdict=_VERDICTS[cause],
        loss_scale=scale,
        magnitudes=_magnitudes(seen, layers),
        observed_alike=_alike(attempt, seen),
    )
    failed = _failed(seen)
    if cause is scaler.Cause.NONE:
        masked = tuple(name for name, frame in seen.frames.items() if not frame.finite and frame.kind != "Const")
        return dataclasses.replace(known, masked=masked)
    found = origins(seen.frames, failed)
    first = found[0] if found else None
    fits_at = None
    if cause in (scaler.Cause.OVERFLOW, scaler.Cause.BACKWARD) and scale:
        fits_at = fitting_scale(attempts, scale)
        known = dataclasses.replace(known, fits_at=fits_at, verdict=_of_scale(attempts, fits_at))
    if first is None:
        return dataclasses.replace(known, remedies=tuple(tried(attempts, proposals(attempts, layers, None, None, False))))
    over = octaves_over(first, _true_amax(attempts, layers, seen, first))
    layer = first.layer if first.layer in layers else None
    nearest = _nearest(first, seen.frames) if layer is None else None
    nearest = nearest if nearest in layers else None
    remedies = _remedies(attempts, layers, layer, nearest, singular=over is None, fits_at=fits_at)
    blame = _blame(remedies, fits_at)
    if blame == "weights":
        course = tried_from_checkpoint(attempts)
        remedies = sorted([*course, *remedies], key=lambda remedy: not remedy.finite)
    if layer is None and nearest and _helped(remedies, f"{nearest!r} in float32"):
        layer = nearest
    return dataclasses.replace(
        known,
        where=pass_of(first, seen.frames),
        layer=layer,
        tensor=first.name,
        operation=first.kind,
        line=seen.line(first.name),
        kind=first.problem,
        octaves_over=over,
        blame=blame,
        remedies=tuple(remedies),
    )


def _scanned(attempts: Attempts, layers: Mapping, also: Callable | None = None) -> Scan:
    step = attempts.moment.train_step
    attempts.moment.reset()
    try:
        if isinstance(step, TrainStep):
            with step.retraced(jit_compile=False):
                return scan(attempts.step, attempts.moment.batch, layers, attempts.scalers, also=also)
        return scan(attempts.step, attempts.moment.batch, layers, attempts.scalers, also=also)
    finally:
        attempts.moment.reset()


def _true_amax(attempts: Attempts, layers: Mapping, seen: Scan, first: Frame) -> float:
    if first.source is not None:
        return math.nan
    if first.kind == "Cast":
        return seen.frames[first.inputs[0]].amax if first.inputs else math.nan
    return _scanned(attempts, layers, also=lambda graph: in_float32(graph, first.name)).frames["also"].amax


def _failed(seen: Scan) -> list[str]:
    """What the scaler was given that is not finite: a loss, or else gradients."""
    losses = [name for name in seen.losses if name in seen.frames and not seen.frames[name].finite]
    grads = [name for given in seen.gradients for name in given if name is not None]
    return losses or [name for name in grads if name in seen.frames and not seen.frames[name].finite]


def _loss_scale(attempts: Attempts, attempt: Attempt) -> float | None:
    if "loss_scale" in attempt.outputs:
        return float(attempt.outputs["loss_scale"])
    return float(attempts.scalers[0].loss_scale) if attempts.scalers else None


def _cause(attempts: Attempts, attempt: Attempt) -> scaler.Cause:
    if attempt.finite:
        return scaler.Cause.NONE
    if "cause" in attempt.outputs:
        return scaler.Cause(int(attempt.outputs["cause"]))
    if not math.isfinite(attempt.loss) and "loss" in attempt.outputs:
        return scaler.Cause.LOSS
    return scaler.Cause.OVERFLOW


def _of_scale(attempts: Attempts, fits_at: float | None) -> str:
    if fits_at is None:
        return "backward"
    floors = [getattr(one.strategy, "min_scale", 0.0) for one in attempts.scalers]
    return "floor" if any(isinstance(floor, (int, float)) and floor > fits_at for floor in floors) else "overflow"


def _nearest(frame: Frame, frames: Mapping[str, Frame]) -> str | None:
    """The layer that a tensor of no layer was computed from, by the shortest way."""
    level, seen = [frame], set()
    while level:
        below = []
        for one in level:
            if one.layer is not None and one.part is not Part.OTHER:
                return one.layer
            fresh = [frames[name] for name in one.inputs if name in frames and name not in seen]
            seen.update(other.name for other in fresh)
            below += fresh
        level = below
    return None


def _remedies(
    attempts: Attempts,
    layers: Mapping[str, keras.layers.Layer],
    layer: str | None,
    nearest: str | None,
    *,
    singular: bool,
    fits_at: float | None,
) -> list[Remedy]:
    found = tried(attempts, proposals(attempts, layers, layer, nearest, singular))
    if fits_at is None:
        return found
    lower = Remedy(
        f"loss scale {fits_at:g}",
        True,
        True,
        math.nan,
        f"The step passes at a loss scale of {fits_at:g}: let the strategy go there.",
    )
    return [lower, *found]


def _helped(remedies: list[Remedy], name: str) -> bool:
    return any(remedy.finite for remedy in remedies if remedy.name == name)


def _blame(remedies: list[Remedy], fits_at: float | None) -> str | None:
    other = [remedy for remedy in remedies if remedy.name == "another batch" and remedy.tried]
    if fits_at is not None or not other:
        return None
    return "batch" if other[0].finite else "weights"


def _alike(attempt: Attempt, seen: Scan) -> bool:
    return all(
        bool(seen.outputs[name] == value) or (seen.outputs[name] != seen.outputs[name] and value != value)
        for name, value in attempt.outputs.items()
        if name in ("applied", "cause") and name in seen.outputs
    )


def _magnitudes(seen: Scan, layers: Mapping[str, keras.layers.Layer]) -> tuple[Magnitude, ...]:
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for frame in seen.frames.values():
        if frame.layer is None or frame.source is not None or frame.kind == "Const":
            continue
        if frame.part is Part.FORWARD:
            # What the layer gave last is its output.
            forward[frame.layer] = math.nan if frame.has_nan else frame.amax
        elif frame.part is Part.BACKWARD:
            largest = math.nan if frame.has_nan else max(frame.amax, backward.get(frame.layer, 0.0))
            backward[frame.layer] = largest
    return tuple(
        Magnitude(path, forward.get(path), backward.get(path), layers[path].compute_dtype)
        for path in seen.order
        if path in layers and (path in forward or path in backward)
    )
