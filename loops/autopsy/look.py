"""Looks at one step: where its trouble began, what scale fits it, and what helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

import scaler
from loops.autopsy.attempts import Attempt, Attempts
from loops.autopsy.explanation import Explanation
from loops.autopsy.helped import blame_of, helped, in_order
from loops.autopsy.measured import alike, example_of, magnitudes, measured, true_amax
from loops.autopsy.models import models_of
from loops.autopsy.origin import differentiated, nearest_layer, origins, pass_of
from loops.autopsy.paths import paths_of
from loops.autopsy.proposals import of_update, proposals
from loops.autopsy.remedies import OWN
from loops.autopsy.scales import fitting_scale
from loops.autopsy.scan import Scan
from loops.autopsy.sentence import TAKEN_AGAIN, sentence
from loops.autopsy.shares import at_share_to_blame, in_whole_batch
from loops.autopsy.wider import octaves_over

_VERDICTS = {
    scaler.Cause.NONE: "healthy",
    scaler.Cause.LOSS: "loss",
    scaler.Cause.BACKWARD: "backward",
    scaler.Cause.OVERFLOW: "overflow",
    scaler.Cause.TOO_LARGE: "too_large",
    scaler.Cause.UPDATE: "update",
}


def look(moment: Any, progress: Callable[[], None] = lambda: None, *, remedies: bool = True) -> Explanation:
    """Explains the step that a `Moment` stands before.

    Args:
        moment: From `rewind`.
        progress: Called before each attempt.
        remedies: Whether to try more than a lower loss scale.
    """
    attempts = Attempts(moment, progress)
    layers = paths_of(models_of(moment.train_step))
    step, attempt = failing(moment, attempts)
    replicas = None
    if moment.replicas > 1 and not attempt.finite:
        replicas, attempt = at_share_to_blame(moment, attempts, attempt)
    seen = measured(attempts, layers)
    cause = _cause_of(attempt, seen)
    known = Explanation(
        step=step,
        reproduced=moment.reproduced,
        differs=moment.differs,
        verdict=_VERDICTS[cause],
        loss_scale=attempts.loss_scale,
        attempted=bool((moment.logged or {}).get("attempted", True)),
        magnitudes=magnitudes(seen, layers),
        observed_alike=alike(attempt, seen),
        replicas=replicas,
    )
    if cause is scaler.Cause.NONE and was_skipped(moment):
        known = dataclasses.replace(
            known,
            reproduced=False,
            differs=" ".join(
                [f"Step {step} was skipped in the run's log, and {TAKEN_AGAIN}.", known.differs or ""]
            ).rstrip(),
        )
    if cause is scaler.Cause.NONE:
        masked = tuple(name for name, frame in seen.frames.items() if not frame.finite and frame.kind != "Const")
        known = dataclasses.replace(known, masked=masked)
    else:
        attempts.moves = cause in (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
        attempts.lower_from = attempts.loss_scale if cause is scaler.Cause.LOSS else None
        known = _with_scale(known, attempts, cause)
        known, seen = _below_overflows(known, attempts, layers, seen)
        known = _with_origin(known, attempts, layers, seen, attempt, remedies)
    return dataclasses.replace(known, sentence=sentence(known))


def failing(moment: Any, attempts: Attempts) -> tuple[int, Attempt]:
    """The step as it is; of a window that an earlier micro-batch spoiled, that one, with the weights of the window."""
    attempt = attempts.as_run()
    if attempt.finite and was_skipped(moment):
        # Which products TensorFlow regroups depends on the graph around them, and the run's was another one.
        attempts.literal = True
        attempt = attempts.as_run()
        attempts.literal = not attempt.finite
    if attempts.windowed and attempt.finite and was_skipped(moment):
        for back, batch in enumerate(reversed(moment.before[1 - moment.train_step.accumulate :]), 1):
            earlier = attempts.as_run(batch)
            if not earlier.finite:
                moment.batch = batch
                return moment.step - back, earlier
    return moment.step, attempt


def was_skipped(moment: Any) -> bool:
    """Whether the run's log says that the step was skipped."""
    logged = moment.logged or {}
    return bool(logged.get("attempted", True)) and logged.get("applied") is False


def _with_scale(known: Explanation, attempts: Attempts, cause: scaler.Cause) -> Explanation:
    """Whether a lower loss scale helps is tried, whatever the step presumed."""
    if cause not in (scaler.Cause.OVERFLOW, scaler.Cause.BACKWARD) or not known.loss_scale:
        return known
    fits_at = fitting_scale(attempts, known.loss_scale)
    return dataclasses.replace(known, fits_at=fits_at, verdict=_of_scale(attempts, fits_at))


def _cause_of(attempt: Attempt, seen: Scan) -> scaler.Cause:
    """As the step says; where it does not, a loss that was given to `scale` may have another name among the outputs."""
    lost = any(not seen.frames[name].finite for name in seen.losses if name in seen.frames)
    guessed = attempt.cause is scaler.Cause.OVERFLOW and "cause" not in attempt.outputs
    return scaler.Cause.LOSS if guessed and lost else attempt.cause


def _below_overflows(known: Explanation, attempts: Attempts, layers: Mapping, seen: Scan) -> tuple[Explanation, Scan]:
    """The step at a scale of 1, if it is finite at none: an overflow of a high scale would hide why."""
    if known.verdict != "backward" or not known.loss_scale or known.loss_scale <= 1.0:
        return known, seen
    attempts.lower_from, attempts.scanned_at = known.loss_scale, 1.0 / known.loss_scale
    lower = measured(attempts, layers)
    if _failed(lower):
        return dataclasses.replace(known, seen_at=1.0, magnitudes=magnitudes(lower, layers)), lower
    attempts.scanned_at = None
    return known, seen


def _of_scale(attempts: Attempts, fits_at: float | None) -> str:
    if fits_at is None:
        return "backward"
    floors = [getattr(one.strategy, "min_scale", 0.0) for one in attempts.scalers]
    return "floor" if any(isinstance(floor, (int, float)) and floor > fits_at for floor in floors) else "overflow"


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
    over = octaves_over(first, true_amax(attempts, layers, seen, first))
    own = first.layer if first.layer in layers else None
    nearest = own or nearest_layer(first, seen.frames)
    nearest = nearest if nearest in layers else None
    where = pass_of(first, seen.frames)
    singular = over is None and where in ("forward", "backward")
    began = differentiated(first, seen.frames)
    # Where a scale of use fits, gradients overflow that a denominator may be far from.
    division = None if known.fits_at is not None and known.fits_at >= 1.0 else began
    proposed = []
    if more:
        proposed = proposals(attempts, layers, own, nearest, singular=singular, order=seen.order, division=division)
    remedies = in_order(dataclasses.replace(known, where=where), attempts, proposed)
    if any(remedy.finite and remedy.name == OWN for remedy in remedies):
        known = dataclasses.replace(known, verdict="overflow")
    known = dataclasses.replace(
        known,
        where=where,
        layer=own or (nearest if where == "backward" or helped(remedies, f"{nearest!r} in float32") else None),
        inside=own is not None,
        regularizer=began.penalty,
        tensor=first.name,
        example=_example(known, attempts.moment) if where == "data" else None,
        operation=first.kind,
        line=seen.line(first.name),
        kind=first.problem,
        octaves_over=over,
        blame=blame_of(remedies, where, known.fits_at),
    )
    return dataclasses.replace(known, remedies=tuple(remedies))


def _example(known: Explanation, moment: Any) -> int | None:
    return in_whole_batch(example_of(moment.batch), moment.batch, known.replicas, moment.replicas)


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
        remedies=tuple(in_order(known, attempts, proposed)),
    )


def _failed(seen: Scan) -> list[str]:
    """What the scaler was given that is not finite: a loss, or else gradients."""
    losses = [name for name in seen.losses if name in seen.frames and not seen.frames[name].finite]
    grads = [name for given in seen.gradients for name in given if name is not None]
    return losses or [name for name in grads if name in seen.frames and not seen.frames[name].finite]
