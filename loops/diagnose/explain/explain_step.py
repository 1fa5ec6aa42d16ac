"""Explains one step: finds where the failure began, which loss scale fits, and what helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts
from loops.diagnose.explain.blame import blame_of, grown_through, helped, in_order
from loops.diagnose.explain.circumstances import as_spike, is_spike, literals_of, with_growth, with_zero_gradients
from loops.diagnose.explain.examples import example_of, example_to_blame, is_empty, lost_columns, several_examples
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.label_explained import of_refused_label, with_label
from loops.diagnose.explain.labels import label_behind, label_refused
from loops.diagnose.explain.lower_scales import fitting_scale, fitting_scales, flushes
from loops.diagnose.explain.own_words import said_by_scaler
from loops.diagnose.explain.proposals import proposals, update_proposals
from loops.diagnose.explain.remedies import Kind
from loops.diagnose.explain.scan_results import (
    amax_in_float32,
    failing,
    magnitudes,
    same_as_unobserved,
    scan_step,
    was_skipped,
)
from loops.diagnose.explain.sentence import describe
from loops.diagnose.explain.shares import at_share_to_blame, in_whole_batch
from loops.diagnose.explain.since_checkpoint import lost_weight, risen_rate
from loops.diagnose.graph.models import failed_part, models_in_step, paths_of
from loops.diagnose.graph.origin import Frame, differentiated, nearest_layer, octaves_over, origins, pass_of
from loops.diagnose.graph.scan import Scan
from loops.step.train_step import TrainStep

_VERDICTS = {
    scaler.Cause.NONE: "healthy",
    scaler.Cause.LOSS: "loss",
    scaler.Cause.BACKWARD: "backward",
    scaler.Cause.OVERFLOW: "overflow",
    scaler.Cause.TOO_LARGE: "too_large",
    scaler.Cause.UPDATE: "update",
    scaler.Cause.SPIKE: "spike",
}


def explain_step(
    moment: Any,
    progress: Callable[[], None] = lambda: None,
    *,
    remedies: bool = True,
    in_time: Callable[[], bool] = lambda: True,
) -> Explanation:
    """Explains the step that follows a `ReplayPoint` or a `StepAtHand`.

    Args:
        moment: The run just before the step, from `rewind` or `at_hand`.
        progress: Called before each attempt.
        remedies: Whether to try other remedies even if a lower loss scale helps. If none helps, they are always tried.
        in_time: Whether there is still time to try remedies.
    """
    attempts = Attempts(moment, progress, in_time)
    try:
        return _explained(moment, attempts, remedies)
    except tf.errors.OpError as error:
        label = label_refused(error)
        if label is None:
            raise
        return of_refused_label(moment, label)


def _explained(moment: Any, attempts: Attempts, remedies: bool) -> Explanation:
    layers = paths_of(models_in_step(moment.train_step))
    step, attempt = failing(moment, attempts)
    attempts.part = failed_part(moment.train_step, attempt.outputs)
    replicas = None
    if moment.replicas > 1 and not attempt.finite:
        replicas, attempt = at_share_to_blame(moment, attempts, attempt)
    seen = scan_step(attempts, layers)
    cause = _cause_of(attempts, attempt, seen)
    logged = moment.logged or {}
    retried = _retried_of(logged)
    known = Explanation(
        step=step,
        reproduced=moment.reproduced,
        differs=moment.differs,
        comparable=moment.comparable,
        other_batch=moment.other_batch,
        verdict=_VERDICTS[cause],
        loss_scale=attempts.loss_scale,
        retried=None if retried is None else (int(logged[f"{retried}retries"]), float(logged[f"{retried}loss_scale"])),
        applied=attempt.applied,
        attempted=bool((moment.logged or {}).get("attempted", True)),
        magnitudes=magnitudes(seen, layers),
        observed_alike=same_as_unobserved(attempt, seen),
        replicas=replicas,
    )
    if is_spike(cause, logged):
        known = as_spike(known, attempts, attempt)
        return dataclasses.replace(known, sentence=describe(known))
    if attempt.applied and was_skipped(moment):
        again = "finite" if attempt.finite else "applied"
        differs = f"Step {step} was skipped in the run's log, but is {again} in the replay. {known.differs or ''}"
        known = dataclasses.replace(known, reproduced=False, differs=differs.rstrip(), finite_again=attempt.finite)
    if cause is scaler.Cause.NONE:
        masked = tuple(name for name, frame in seen.frames.items() if not frame.finite and frame.kind != "Const")
        own = getattr(moment.train_step, "scalers", {}).get((retried or "").removesuffix("/"))
        known = dataclasses.replace(known, masked=masked, loss_scale=float(own.loss_scale) if own else known.loss_scale)
        known = with_zero_gradients(known, attempts, attempt)
    else:
        attempts.moves = cause in (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)
        attempts.lower_from = attempts.loss_scale if cause is scaler.Cause.LOSS else None
        if cause is scaler.Cause.UPDATE:
            known = dataclasses.replace(known, said=said_by_scaler(attempts, cause))
        known = _with_scale(known, attempts, cause, layers)
        known, seen = _without_overflow(known, attempts, layers, seen)
        known = _with_origin(known, attempts, layers, seen, attempt, remedies or not known.scale_was_too_high)
        known = with_growth(known, attempts)
        if cause is scaler.Cause.UPDATE or (known.blame == "weights" and not known.lost_weight):
            known = dataclasses.replace(known, learning_rates=risen_rate(moment, attempts.part))
    return dataclasses.replace(known, sentence=describe(known))


def _retried_of(logged: Mapping) -> str | None:
    """Which columns of the log say how often a step was retried, and at which loss scale it was applied.

    Returns:
        What stands before "retries" and "loss_scale": nothing for a `TrainStep`, and for a `ComposedStep` the name of
        its first part that was retried, as "actor/". None if nothing was.
    """
    names = [name.removesuffix("retries") for name in logged if name.rpartition("/")[2] == "retries"]
    for name in names:
        retries, loss_scale = logged[f"{name}retries"], logged.get(f"{name}loss_scale")
        if isinstance(retries, (int, float)) and isinstance(loss_scale, (int, float)) and retries > 0:
            return name
    return None


def _with_scale(
    known: Explanation, attempts: Attempts, cause: scaler.Cause, layers: Mapping[str, keras.layers.Layer]
) -> Explanation:
    """Tries whether a lower loss scale helps, whatever cause the step reported."""
    tried = (scaler.Cause.OVERFLOW, scaler.Cause.BACKWARD, scaler.Cause.LOSS)
    if cause not in tried or known.applied or not known.loss_scale:
        return known
    several = fitting_scales(attempts) if len(attempts.guilty) > 1 else []
    fits_at, flushed_at = several[0][1] if several else fitting_scale(attempts, known.loss_scale), None
    if fits_at is not None and flushes(attempts, layers, fits_at):
        fits_at, flushed_at = None, fits_at
    if cause is scaler.Cause.LOSS:
        return dataclasses.replace(known, applied_at=fits_at, flushed_at=flushed_at)
    verdict = _verdict_at_scale(attempts, fits_at)
    return dataclasses.replace(
        known, fits_at=fits_at, flushed_at=flushed_at, verdict=verdict, other_scales=tuple(several[1:])
    )


def _cause_of(attempts: Attempts, attempt: Attempt, seen: Scan) -> scaler.Cause:
    """The cause that the step reports. If it reports none, the loss passed to `scale` decides, whatever its name."""
    lost = any(not seen.frames[name].finite for name in seen.losses if name in seen.frames)
    guessed = attempt.cause is scaler.Cause.OVERFLOW and not attempt.reports_cause
    if guessed and not lost and "cause" in attempt.outputs and attempts.gradients_are_finite():
        return scaler.Cause.NONE
    return scaler.Cause.LOSS if guessed and lost else attempt.cause


def _without_overflow(known: Explanation, attempts: Attempts, layers: Mapping, seen: Scan) -> tuple[Explanation, Scan]:
    """Measures the step at a scale of 1 if it is finite at none: an overflow of a high scale would hide the reason."""
    if known.verdict != "backward" or not known.loss_scale or known.loss_scale <= 1.0:
        return known, seen
    attempts.lower_from, attempts.scanned_at = known.loss_scale, 1.0 / known.loss_scale
    lower = scan_step(attempts, layers)
    if lower.failed:
        return dataclasses.replace(known, seen_at=1.0, magnitudes=magnitudes(lower, layers)), lower
    attempts.scanned_at = None
    return known, seen


def _verdict_at_scale(attempts: Attempts, fits_at: float | None) -> str:
    if fits_at is None:
        return "backward"
    floor = getattr(attempts.to_blame and attempts.to_blame.strategy, "min_scale", 0.0)
    return "floor" if isinstance(floor, (int, float)) and floor > fits_at else "overflow"


def _with_origin(
    known: Explanation,
    attempts: Attempts,
    layers: Mapping[str, keras.layers.Layer],
    seen: Scan,
    attempt: Attempt,
    more: bool,
) -> Explanation:
    first = next(iter(origins(seen.frames, seen.failed)), None)
    if first is None:
        return _with_variable(known, attempts, layers, attempt)
    label = label_behind(seen, first)
    if label is not None:
        return with_label(known, attempts.moment, seen, first, label)
    if first.blind:
        return _with_lost_trail(known, attempts, layers, seen, first, more)
    over = octaves_over(first, amax_in_float32(seen, first))
    own = first.layer if first.layer in layers else None
    nearest = own or nearest_layer(first, seen.frames)
    nearest = nearest if nearest in layers else None
    where = pass_of(first, seen.frames)
    singular = over is None and where in ("forward", "backward")
    began = differentiated(first, seen.frames)
    # If a useful scale fits, the overflow may be far from this denominator or exponent.
    operation = None if known.fits_at is not None and known.fits_at >= 1.0 else began
    proposed = []
    if more:
        proposed = proposals(attempts, layers, own, nearest, singular=singular, order=seen.order, operation=operation)
    lost = lost_weight(attempts) if where == "weights" else None
    known = dataclasses.replace(known, where=where, lost_weight=lost)
    remedies = in_order(known, attempts, proposed)
    cleared = (one for one in remedies if one.kind is Kind.OWN_VARIABLES_CLEARED and not one.since_checkpoint)
    if known.fits_at is not None and any(one.helps for one in cleared):
        known = dataclasses.replace(known, verdict="overflow")
    wider = helped(remedies, Kind.LAYER_IN_FLOAT32, nearest)
    known = dataclasses.replace(
        known,
        layer=own or (nearest if where == "backward" or wider else None),
        inside=own is not None,
        regularizer=began.penalty,
        custom_gradient=first.custom,
        tensor=first.name,
        operation=first.kind,
        line=seen.line(first.name),
        kind=first.problem,
        octaves_over=over,
        empty=where in ("forward", "backward") and is_empty(attempts.moment.batch),
        blame=blame_of(remedies, where, known.fits_at, attempts.moment),
        grown_through=grown_through(remedies),
    )
    known = dataclasses.replace(known, remedies=tuple(remedies), columns=_columns(known, attempts.moment))
    if not more:
        return known
    literals = literals_of(attempts, layers, known.layer) if known.layer and known.fits_at is None else ()
    return dataclasses.replace(known, example=_example(known, attempts), literals=literals)


def _with_lost_trail(
    known: Explanation,
    attempts: Attempts,
    layers: Mapping[str, keras.layers.Layer],
    seen: Scan,
    first: Frame,
    more: bool,
) -> Explanation:
    """The explanation if the trail ends at something that cannot be measured: no layer is blamed."""
    proposed = proposals(attempts, layers, None, None, singular=False, order=seen.order) if more else []
    remedies = in_order(known, attempts, proposed)
    known = dataclasses.replace(
        known,
        tensor=first.name,
        operation=first.kind,
        line=seen.line(first.name),
        kind=first.problem,
        blame=blame_of(remedies, None, known.fits_at),
        remedies=tuple(remedies),
    )
    return dataclasses.replace(known, example=_example(known, attempts) if more else None)


def _example(known: Explanation, attempts: Attempts) -> int | None:
    """The position of the example where it began, unless it began in the weights."""
    moment = attempts.moment
    found = example_of(moment.batch) if known.where == "data" else None
    several, remedies = known.fits_at is None, list(known.remedies)
    # If other batches fail too, the worst example is not the cause.
    sought = helped(remedies, Kind.ANOTHER_BATCH) or (several and known.blame != "weights")
    if found is None and known.where != "weights" and sought and attempts.in_time():
        found = example_to_blame(attempts, attempts.scanned_at or 1.0, several=several)
    return in_whole_batch(found, moment.batch, known.replicas, moment.replicas)


def _columns(known: Explanation, moment: Any) -> tuple[tuple[int | str, int | None], ...]:
    """The columns of the data that no example fills; with a single example they are only those of that example."""
    if known.where != "data":
        return ()
    found = lost_columns(moment.batch, moment.next_batch) if known.blame == "dataset" else lost_columns(moment.batch)
    return found if known.blame == "dataset" or several_examples(moment.batch) else ()


def _with_variable(
    known: Explanation, attempts: Attempts, layers: Mapping[str, keras.layers.Layer], attempt: Attempt
) -> Explanation:
    """The explanation if the gradients are finite, but their norm or the update is not."""
    moment = attempts.moment
    proposed = [*update_proposals(attempts), *proposals(attempts, layers, None, None, singular=False)]
    position = int(attempt.outputs.get("variable", -1))
    # The list that a step of one's own gives to `apply` may have another order.
    step = moment.train_step
    variables = step.model.trainable_variables if isinstance(step, TrainStep) else []
    variable = variables[position] if 0 <= position < len(variables) else None
    holders = [path for path, layer in layers.items() if any(one is variable for one in layer.variables)]
    return dataclasses.replace(
        known,
        where="backward",
        layer=max(holders, key=len, default=None),
        tensor=None if variable is None else variable.path,
        remedies=tuple(in_order(known, attempts, proposed)),
    )
