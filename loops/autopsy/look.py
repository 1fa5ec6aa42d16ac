"""Looks at one step: where its trouble began, what scale fits it, and what helps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.autopsy.attempts import Attempt, Attempts
from loops.autopsy.course import SINCE, tried_from_checkpoint
from loops.autopsy.explanation import Explanation, Magnitude
from loops.autopsy.frames import Frame, Part
from loops.autopsy.models import models_of
from loops.autopsy.origin import nearest_layer, origins, pass_of
from loops.autopsy.paths import paths_of
from loops.autopsy.remedies import (
    ANOTHER_BATCH,
    HIDES,
    OWN,
    Proposal,
    Remedy,
    fitting_scale,
    of_update,
    proposals,
    tried,
)
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
_ABSURD = 1e4
"""A loss that is so many times the largest before it shows a remedy that does not train."""
_GROWN = 100.0
"""A loss that is so many times the least before it has left where it was."""


def look(moment: Any, progress: Callable[[], None] = lambda: None, *, remedies: bool = True) -> Explanation:
    """Explains the step that a `Moment` stands before.

    Args:
        moment: From `rewind`.
        progress: Called before each attempt.
        remedies: Whether to try more than a lower loss scale.
    """
    attempts = Attempts(moment, progress)
    layers = paths_of(models_of(moment.train_step))
    step, attempt = _failing(moment, attempts)
    seen = _scanned(attempts, layers)
    cause = _cause(attempt)
    known = Explanation(
        step=step,
        reproduced=moment.reproduced,
        differs=moment.differs,
        verdict=_VERDICTS[cause],
        loss_scale=attempts.loss_scale,
        attempted=bool((moment.logged or {}).get("attempted", True)),
        magnitudes=_magnitudes(seen, layers),
        observed_alike=_alike(attempt, seen),
    )
    if cause is scaler.Cause.NONE and _was_skipped(moment):
        known = dataclasses.replace(
            known,
            reproduced=False,
            differs=f"Step {step} was skipped in the run's log, and taken again it is finite.",
        )
    if cause is scaler.Cause.NONE:
        masked = tuple(name for name, frame in seen.frames.items() if not frame.finite and frame.kind != "Const")
        known = dataclasses.replace(known, masked=masked)
    else:
        attempts.moves = cause in (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
        attempts.lower_from = attempts.loss_scale if cause is scaler.Cause.LOSS else None
        known = _with_scale(known, attempts, cause)
        known = _with_origin(known, attempts, layers, seen, attempt, remedies)
    return dataclasses.replace(known, sentence=sentence(known))


def _failing(moment: Any, attempts: Attempts) -> tuple[int, Attempt]:
    """The step as it is; of a window that an earlier micro-batch spoiled, that one, with the weights of the window."""
    attempt = attempts.as_run()
    if attempts.windowed and attempt.finite and _was_skipped(moment):
        for back, batch in enumerate(reversed(moment.before[1 - moment.train_step.accumulate :]), 1):
            earlier = attempts.as_run(batch)
            if not earlier.finite:
                moment.batch = batch
                return moment.step - back, earlier
    return moment.step, attempt


def _was_skipped(moment: Any) -> bool:
    logged = moment.logged or {}
    return bool(logged.get("attempted", True)) and logged.get("applied") is False


def _with_scale(known: Explanation, attempts: Attempts, cause: scaler.Cause) -> Explanation:
    """Whether a lower loss scale helps is tried, whatever the step presumed."""
    if cause not in (scaler.Cause.OVERFLOW, scaler.Cause.BACKWARD) or not known.loss_scale:
        return known
    fits_at = fitting_scale(attempts, known.loss_scale)
    return dataclasses.replace(known, fits_at=fits_at, verdict=_of_scale(attempts, fits_at))


def _of_variable(
    known: Explanation, attempts: Attempts, layers: Mapping[str, keras.layers.Layer], attempt: Attempt
) -> Explanation:
    """Of a step whose gradients are finite: too large, or an update that is not."""
    moment = attempts.moment
    proposed = [*of_update(attempts), *proposals(attempts, layers, None, None, singular=False)]
    position = int(attempt.outputs.get("variable", -1))
    variables = getattr(getattr(moment.train_step, "model", None), "trainable_variables", [])
    variable = variables[position] if 0 <= position < len(variables) else None
    holders = [path for path, layer in layers.items() if any(one is variable for one in layer.variables)]
    return dataclasses.replace(
        known,
        where="backward",
        layer=max(holders, key=len, default=None),
        tensor=None if variable is None else variable.path,
        remedies=tuple(_remedies(known, attempts, proposed)),
    )


def _with_origin(
    known: Explanation,
    attempts: Attempts,
    layers: Mapping[str, keras.layers.Layer],
    seen: Scan,
    attempt: Attempt,
    more: bool,
) -> Explanation:
    first = next(iter(origins(seen.frames, _failed(seen))), None)
    if first is None:
        return _of_variable(known, attempts, layers, attempt)
    over = octaves_over(first, _true_amax(attempts, layers, seen, first))
    own = first.layer if first.layer in layers else None
    nearest = own or nearest_layer(first, seen.frames)
    nearest = nearest if nearest in layers else None
    where = pass_of(first, seen.frames)
    singular = over is None and where in ("forward", "backward")
    proposed = proposals(attempts, layers, own, nearest, singular=singular, order=seen.order) if more else []
    remedies = _remedies(dataclasses.replace(known, where=where), attempts, proposed)
    if any(remedy.finite and remedy.name == OWN for remedy in remedies):
        known = dataclasses.replace(known, verdict="overflow")
    known = dataclasses.replace(
        known,
        where=where,
        layer=own or (nearest if where == "backward" or _helped(remedies, f"{nearest!r} in float32") else None),
        inside=own is not None,
        tensor=first.name,
        example=_example(attempts.moment.batch) if where == "data" else None,
        operation=first.kind,
        line=seen.line(first.name),
        kind=first.problem,
        octaves_over=over,
        blame=_blame(remedies, where, known.fits_at),
    )
    return dataclasses.replace(known, remedies=tuple(remedies))


def _scanned(attempts: Attempts, layers: Mapping, also: Callable | None = None) -> Scan:
    step = attempts.moment.train_step
    plain = step.retraced(jit_compile=False) if isinstance(step, TrainStep) else contextlib.nullcontext()
    with attempts.as_it_was(), plain:
        return scan(attempts.take_inlined, attempts.moment.batch, layers, attempts.scalers, also=also)


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


def _cause(attempt: Attempt) -> scaler.Cause:
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


def _remedies(known: Explanation, attempts: Attempts, proposed: list[Proposal]) -> list[Remedy]:
    """What was tried, with what helps first, and of that what changes least."""
    found = tried(attempts, proposed)
    if known.fits_at is not None:
        constant = any(isinstance(one.strategy, scaler.Static) for one in attempts.scalers)
        go = f"use scaler.Static({known.fits_at:g}), or scaler.Dynamic()" if constant else "let the strategy go there"
        said = f"The step passes at a loss scale of {known.fits_at:g}: {go}."
        lower = Remedy(f"loss scale {known.fits_at:g}", True, True, math.nan, said)
        # Below 1 the scale makes gradients smaller than they are: that is no cure.
        found = [lower, *found] if known.fits_at >= 1.0 else [*found, lower]
    if _gone_bad(known, attempts.moment, found):
        found = [*tried_from_checkpoint(attempts), *found]
    usual = max((abs(loss) for loss in _losses_before(attempts.moment)), default=math.inf)

    def place(remedy: Remedy) -> tuple:
        absurd = math.isfinite(remedy.loss) and abs(remedy.loss) > _ABSURD * max(usual, 1.0)
        return not remedy.finite, absurd, HIDES in remedy.name, not remedy.name.startswith(OWN)

    return sorted(found, key=place)


def _gone_bad(known: Explanation, moment: Any, found: list[Remedy]) -> bool:
    """Whether the weights may have: no scale of use fits, or the loss has grown, or other batches fail, too."""
    losses = _losses_before(moment)
    now = (moment.logged or {}).get("loss")
    grown = bool(losses) and (now is None or now > _GROWN * min(losses))
    useless = known.fits_at is not None and known.fits_at < 1.0
    bad_update = known.verdict in ("too_large", "update")
    in_place = [one for one in found if one.finite and one.name.endswith(" in float32") and "'" in one.name]
    unknown = not losses and known.verdict == "loss" and not in_place
    bad = known.where == "weights"
    return bad or useless or bad_update or ((grown or unknown) and not _helped(found, ANOTHER_BATCH))


def _losses_before(moment: Any) -> list[float]:
    return [row["loss"] for row in moment.rows if row["step"] < moment.step and row.get("loss") is not None]


def _helped(remedies: list[Remedy], name: str) -> bool:
    return any(remedy.finite for remedy in remedies if remedy.name == name)


def _example(batch: Any) -> int | None:
    """The first example of a batch that holds what is not finite."""
    for part in tf.nest.flatten(batch):
        if isinstance(part, tf.Tensor) and part.dtype.is_floating and part.shape.rank:
            bad = ~np.isfinite(part.numpy().astype(np.float64).reshape(len(part), -1)).all(axis=1)
            if bad.any():
                return int(bad.argmax())
    return None


def _blame(remedies: list[Remedy], where: str, fits_at: float | None) -> str | None:
    if where == "data":
        return "batch"
    precision = any(one.finite and "'" in one.name and one.name.endswith(" in float32") for one in remedies)
    if _helped(remedies, ANOTHER_BATCH) and fits_at is None and not precision:
        return "batch"
    course = any(remedy.finite for remedy in remedies if SINCE in remedy.name)
    return "weights" if where == "weights" or course else None


def _alike(attempt: Attempt, seen: Scan) -> bool:
    """Whether the step was as finite under observation as without."""
    given = [*seen.losses, *(name for names in seen.gradients for name in names if name is not None)]
    observed = all(seen.frames[name].finite for name in given if name in seen.frames)
    loss = all(seen.frames[name].finite for name in seen.losses if name in seen.frames)
    if "loss" in attempt.outputs and seen.losses and loss != math.isfinite(attempt.loss):
        return False
    return observed == attempt.finite or _cause(attempt) in (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)


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
