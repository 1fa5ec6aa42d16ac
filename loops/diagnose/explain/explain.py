"""Explains a past step of a run: finds where the failure began, which loss scale fits, and what helps.

It chooses the step from the run's log, and finds a second fault behind a bad batch: later skips of the same streak, of
steps whose own batches are finite.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import scaler
from loops.actions.checkpoint import Checkpoint
from loops.diagnose.explain import examples, measured, trials
from loops.diagnose.explain.attempts import Attempt, Attempts, Progress, attempts_at
from loops.diagnose.explain.case import Case
from loops.diagnose.explain.examples import example_of
from loops.diagnose.explain.explanation import Explanation, Label, began, describe
from loops.diagnose.explain.remedies import AT_THE_STEP, OF_THE_UPDATE, Kind
from loops.diagnose.graph.changes import without_advice
from loops.diagnose.graph.models import failed_part
from loops.diagnose.graph.origin import differentiated, nearest_layer, origins, pass_of
from loops.diagnose.graph.scan import Scan
from loops.loop.loop import Loop
from loops.record.files import TRACE, counted_in
from loops.record.log import read_columns
from loops.record.reading import read_steps
from loops.record.skips import SHARE, Health, health, in_words, not_logged, what_is_wrong
from loops.record.steps import cause_name
from loops.record.trace import Trace
from loops.run.rewind.rewind import log_of
from loops.step.train_step import TrainStep
from loops.support.batches import label_in
from loops.support.errors import LoopError
from loops.support.text import agreeing

_AT_A_SCALE = (scaler.Cause.OVERFLOW, scaler.Cause.BACKWARD, scaler.Cause.LOSS)
_OF_FINITE = (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE)


def explain_step(attempts: Attempts, *, remedies: bool = True) -> Explanation:
    """Explains a step.

    Args:
        attempts: The attempts at the step.
        remedies: Whether to try other remedies even if a lower loss scale helps. If none helps, they are always tried.
    """
    try:
        known = _explained(attempts, remedies)
    except tf.errors.OpError as error:
        label = label_in(error)
        if label is None:
            raise
        known = _of_refused_label(attempts.moment, Label(*label))
    return dataclasses.replace(known, sentence=describe(known))


def _of_refused_label(moment: Any, label: Label) -> Explanation:
    """The explanation of a step whose label this device refuses: XLA made a NaN of it in the run.

    Nothing else is known of the replay, nor needed: the label is in the batch, whatever the weights are.
    """
    logged = moment.logged or {}
    return Explanation(
        step=moment.step,
        reproduced=True,
        differs=None,
        verdict="loss",
        where="data",
        kind="nan",
        loss_scale=logged.get("loss_scale"),
        attempted=bool(logged.get("attempted", True)),
        label=label,
        example=examples.example_with(label.value, moment.batch),
    )


def _explained(attempts: Attempts, remedies: bool) -> Explanation:
    moment = attempts.moment
    step, attempt = measured.failing(attempts)
    attempts.part = failed_part(moment.train_step, attempt.outputs)
    replicas = None
    if moment.replicas > 1 and not attempt.finite:
        replicas, attempt = measured.at_share_to_blame(attempts, attempt)
    seen = measured.scan_step(attempts)
    cause = _cause_of(attempts, attempt, seen)
    logged = moment.logged or {}
    retried = _retried_of(logged)
    known = Explanation(
        step=step,
        reproduced=moment.reproduced,
        differs=moment.differs,
        comparable=moment.comparable,
        other_batch=moment.other_batch,
        verdict="healthy" if cause is scaler.Cause.NONE else cause.name.lower(),
        loss_scale=attempts.loss_scale,
        retried=None if retried is None else (int(logged[f"{retried}retries"]), float(logged[f"{retried}loss_scale"])),
        applied=attempt.applied,
        attempted=bool(logged.get("attempted", True)),
        magnitudes=measured.magnitudes(attempts, seen),
        observed_alike=measured.same_as_unobserved(attempt, seen),
        replicas=replicas,
    )
    # A replayed micro-batch is a step by itself, which need not be a spike.
    if cause is scaler.Cause.SPIKE or cause_name(logged.get("cause")) == scaler.Cause.SPIKE.name:
        return measured.as_spike(known, attempts, attempt)
    if attempt.applied and measured.was_skipped(moment):
        again = "finite" if attempt.finite else "applied"
        differs = f"Step {step} was skipped in the run's log, but is {again} in the replay. {known.differs or ''}"
        known = dataclasses.replace(known, reproduced=False, differs=differs.rstrip(), finite_again=attempt.finite)
    if cause is scaler.Cause.NONE:
        masked = tuple(name for name, frame in seen.frames.items() if not frame.finite and frame.kind != "Const")
        own = getattr(moment.train_step, "scalers", {}).get((retried or "").removesuffix("/"))
        known = dataclasses.replace(known, masked=masked, loss_scale=float(own.loss_scale) if own else known.loss_scale)
        return measured.with_zero_gradients(known, attempts, attempt)
    attempts.moves = cause in _OF_FINITE
    attempts.lower_from = attempts.loss_scale if cause is scaler.Cause.LOSS else None
    if cause is scaler.Cause.UPDATE:
        known = dataclasses.replace(known, said=measured.said_by_scaler(attempts, cause))
    known = _with_scale(known, attempts, cause)
    known, seen = _without_overflow(known, attempts, seen)
    known = _with_origin(known, attempts, seen, attempt, remedies or not known.scale_was_too_high)
    known = dataclasses.replace(known, growth=measured.growth_of(known, attempts))
    if cause is scaler.Cause.UPDATE or (known.blame == "weights" and not known.lost_weight):
        known = dataclasses.replace(known, learning_rates=Case(attempts).risen_rate)
    return known


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


def _cause_of(attempts: Attempts, attempt: Attempt, seen: Scan) -> scaler.Cause:
    """The cause that the step reports. If it reports none, the loss passed to `scale` decides, whatever its name."""
    lost = any(not seen.frames[name].finite for name in seen.losses if name in seen.frames)
    guessed = attempt.cause is scaler.Cause.OVERFLOW and not attempt.reports_cause
    if guessed and not lost and "cause" in attempt.outputs:
        decided = [finite for _, finite in attempts.take_at(1.0).decided]
        if decided and all(decided):
            return scaler.Cause.NONE
    return scaler.Cause.LOSS if guessed and lost else attempt.cause


def _with_scale(known: Explanation, attempts: Attempts, cause: scaler.Cause) -> Explanation:
    """Tries whether a lower loss scale helps, whatever cause the step reported."""
    if cause not in _AT_A_SCALE or known.applied or not known.loss_scale:
        return known
    (_, fits_at), *others = measured.fitting_scales(attempts)
    flushed_at = None
    if fits_at is not None and measured.flushes(attempts, fits_at):
        fits_at, flushed_at = None, fits_at
    if cause is scaler.Cause.LOSS:
        return dataclasses.replace(known, applied_at=fits_at, flushed_at=flushed_at)
    floor = getattr(attempts.to_blame and attempts.to_blame.strategy, "min_scale", 0.0)
    verdict = "backward"
    if fits_at is not None:
        verdict = "floor" if isinstance(floor, (int, float)) and floor > fits_at else "overflow"
    return dataclasses.replace(
        known, fits_at=fits_at, flushed_at=flushed_at, verdict=verdict, other_scales=tuple(others)
    )


def _without_overflow(known: Explanation, attempts: Attempts, seen: Scan) -> tuple[Explanation, Scan]:
    """Measures the step at a scale of 1 if it is finite at none: an overflow of a high scale would hide the reason."""
    if known.verdict != "backward" or not known.loss_scale or known.loss_scale <= 1.0:
        return known, seen
    attempts.lower_from, attempts.scanned_at = known.loss_scale, 1.0 / known.loss_scale
    lower = measured.scan_step(attempts)
    if lower.failed:
        return dataclasses.replace(known, seen_at=1.0, magnitudes=measured.magnitudes(attempts, lower)), lower
    attempts.scanned_at = None
    return known, seen


def _with_origin(known: Explanation, attempts: Attempts, seen: Scan, attempt: Attempt, more: bool) -> Explanation:
    """With where the failure began, who is to blame, and what helps.

    Args:
        known: What is known about the step so far.
        attempts: The attempts at the step.
        seen: The measured step.
        attempt: The attempt as the run takes it.
        more: Whether to try other remedies than the loss scale that fits.
    """
    moment, layers = attempts.moment, attempts.layers
    first = next(iter(origins(seen.frames, seen.failed)), None)
    if first is None:
        return _with_variable(known, attempts, attempt)
    line, rows = seen.line(first.name), AT_THE_STEP if more else ()
    known = dataclasses.replace(known, tensor=first.name, operation=first.kind, line=line, kind=first.problem)
    label = examples.label_behind(seen, first)
    if label is not None:
        found = measured.in_whole_batch(examples.example_with(label.value, moment.batch), known.replicas, moment)
        return dataclasses.replace(known, where="data", label=label, example=found)
    if first.blind:
        # The trail ends at something that cannot be measured: no layer is blamed.
        remedies = trials.in_order(known, Case(attempts), rows)
        known = dataclasses.replace(
            known, blame=trials.blame_of(remedies, None, known.fits_at), remedies=tuple(remedies)
        )
        return dataclasses.replace(known, example=_example(known, attempts) if more else None)
    over = measured.octaves_beyond(seen, first)
    own = first.layer if first.layer in layers else None
    nearest = own or nearest_layer(first, seen.frames)
    nearest = nearest if nearest in layers else None
    where = pass_of(first, seen.frames)
    began = differentiated(first, seen.frames)
    lost = measured.lost_weight(attempts) if where == "weights" else None
    known = dataclasses.replace(known, where=where, lost_weight=lost)
    singular = over is None and where in ("forward", "backward")
    # If a useful scale fits, the overflow may be far from this denominator or exponent.
    operation = None if known.fits_at is not None and known.fits_at >= 1.0 else began
    remedies = trials.in_order(known, Case(attempts, nearest, singular, seen.order, operation), rows)
    cleared = (one for one in remedies if one.kind is Kind.OWN_VARIABLES_CLEARED and not one.since_checkpoint)
    if known.fits_at is not None and any(one.helps for one in cleared):
        known = dataclasses.replace(known, verdict="overflow")
    wider = trials.helped(remedies, Kind.LAYER_IN_FLOAT32, nearest)
    known = dataclasses.replace(
        known,
        layer=own or (nearest if where == "backward" or wider else None),
        inside=own is not None,
        regularizer=began.penalty,
        custom_gradient=first.custom,
        octaves_over=over,
        empty=where in ("forward", "backward") and examples.is_empty(moment.batch),
        blame=trials.blame_of(remedies, where, known.fits_at, moment),
        grown_through=trials.grown_through(remedies),
        remedies=tuple(remedies),
    )
    known = dataclasses.replace(known, columns=_columns(known, moment))
    if not more:
        return known
    literals = measured.literals_of(attempts, known.layer, seen) if known.layer and known.fits_at is None else ()
    return dataclasses.replace(known, example=_example(known, attempts), literals=literals)


def _example(known: Explanation, attempts: Attempts) -> int | None:
    """The position of the example where it began, unless it began in the weights."""
    moment = attempts.moment
    found = examples.example_of(moment.batch) if known.where == "data" else None
    several = known.fits_at is None
    # If other batches fail too, the worst example is not the cause.
    sought = trials.helped(known.remedies, Kind.ANOTHER_BATCH) or (several and known.blame != "weights")
    if found is None and known.where != "weights" and sought and attempts.in_time():
        found = examples.example_to_blame(attempts, attempts.scanned_at or 1.0, several=several)
    return measured.in_whole_batch(found, known.replicas, moment)


def _columns(known: Explanation, moment: Any) -> tuple[tuple[int | str, int | None], ...]:
    """The columns of the data that no example fills; with a single example they are only those of that example."""
    if known.where != "data":
        return ()
    if known.blame == "dataset":
        return examples.lost_columns(moment.batch, moment.next_batch)
    return examples.lost_columns(moment.batch) if examples.length_of(moment.batch) > 1 else ()


def _with_variable(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation if the gradients are finite, but their norm or the update is not."""
    position = int(attempt.outputs.get("variable", -1))
    # The list that a step of one's own gives to `apply` may have another order.
    step = attempts.moment.train_step
    variables = step.model.trainable_variables if isinstance(step, TrainStep) else []
    variable = variables[position] if 0 <= position < len(variables) else None
    holders = [path for path, layer in attempts.layers.items() if any(one is variable for one in layer.variables)]
    return dataclasses.replace(
        known,
        where="backward",
        layer=max(holders, key=len, default=None),
        tensor=None if variable is None else variable.path,
        remedies=tuple(trials.in_order(known, Case(attempts), (*OF_THE_UPDATE, *AT_THE_STEP))),
    )


_REPLAYED = 10
"""The number of steps to replay before the one explained, so that remedies for diverging weights can be tried."""


@without_advice()
def explain(
    loop: Loop, step: int | None = None, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> Explanation:
    """Explains why a step was skipped, by repeating it.

    Args:
        loop: A new loop as the program creates it, with the run's `Checkpoint` among its actions. Nothing is written,
            and no action runs. The loop cannot be used afterwards.
        step: The number of the step, counted in batches from 1, as in the log. By default the step in which the last
            problem in the run's log and trace began. If there was none, the explanation says that the run is healthy,
            or how many skips they do not show. If that step was skipped because of its batch, and steps after it in
            the same streak for another reason, it is the first of these, and the sentence says both.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        progress: Called now and then with a text that says what is done.

    Raises:
        scaler.InvalidArgument: For a step that the run did not take, or a loop that cannot be rewound.
        LoopError: If the run cannot be restored.
    """
    found, folder = None, None if run is None else pathlib.Path(run)
    if step is None:
        traces = [action.writes.path for action in loop.actions if isinstance(action, Trace)]
        recorded = read_steps(next(iter(traces), folder / TRACE if folder else None), log_of(loop, folder))
        saves = next((action for action in loop.actions if isinstance(action, Checkpoint)), None)
        counted = counted_in(saves.place, recorded.step.tolist()) if saves else None
        found = health(recorded, counted, traced=recorded.traced)
        step = found.step or found.last
        if not step:
            raise LoopError(
                "there is no log of the run to choose a step from: name one with step= (on the command line --step), "
                "or let the run write a log with hs.JsonLines."
            )
    attempts = attempts_at(loop, step, folder, progress, at_least=_REPLAYED)
    explanation = explain_step(attempts, remedies=found is None or not found.healthy)
    if found and found.later and explanation.where == "data":
        explanation = _second_fault(attempts, explanation, found.later) or explanation
    explanation = _with_health(explanation, found) if found else explanation
    log = log_of(loop, folder)
    if log is not None and log.is_file():
        said = [explanation.sentence, *read_columns(log).damage(log.name, "it counts as unknown")]
        explanation = dataclasses.replace(explanation, sentence=" ".join(said))
    return explanation


def _with_health(explanation: Explanation, found: Health) -> Explanation:
    if not found.healthy:
        text = f"{explanation.sentence} {what_is_wrong(found)}".rstrip()
        return dataclasses.replace(explanation, sentence=text)
    # The step itself may show more than the log, in which some programs write no causes.
    # A few steps with zero gradients are no problem of the run.
    if explanation.verdict not in ("healthy", "zero") and not explanation.scale_was_too_high:
        return explanation
    text = f"{'Nothing is wrong' if found.sure else 'The log shows nothing wrong'}: {in_words(found)}."
    if found.skips and explanation.fits_at is not None:
        text += f" The last was step {explanation.step}, which passes at a loss scale of {explanation.fits_at:g}."
    if found.of_growth > SHARE * found.steps:
        text += " A longer growth interval skips less often."
    if found.thinned:
        text += f" {not_logged(found)}"
    if explanation.differs:
        text += f" The replay differs from the run: {explanation.differs}"
    verdict = "unlogged" if found.open else "healthy"
    return dataclasses.replace(explanation, verdict=verdict, sentence=text)


_FAR = 1000
"""Batches of so many further steps are looked at."""


def _second_fault(attempts: Attempts, first: Explanation, later: Sequence[int]) -> Explanation | None:
    """Explains the first later skip that its own batch does not explain, and adds why the streak began.

    Args:
        attempts: At the step where the streak began. They cannot be used afterwards.
        first: The explanation of that step, whose batch was at fault.
        later: The numbers of the later skips in the streak.

    Returns:
        None if every later skip may have the same reason, a lower loss scale helps, or the data cannot be read again.
    """
    try:
        step = step_with_finite_batches(attempts.moment, later)
        found = None if step is None else explain_step(Attempts(attempts.moment.ahead(step), attempts.progress))
    except (LoopError, tf.errors.OpError):
        return None
    if found is None or found.where == "data" or found.verdict == "healthy" or found.scale_was_too_high:
        return None
    skips = f"{len(later)} further {agreeing(len(later), 'skip', 'skips')}"
    text = (
        f"{found.sentence} Step {first.step}, where the streak of these {skips} began, was skipped for another reason: "
        f"{began(first)}."
    )
    return dataclasses.replace(found, sentence=text)


def step_with_finite_batches(moment: Any, later: Sequence[int]) -> int | None:
    """The first of these steps whose batches are all finite: the only one, or those of its window."""
    attempts = {row["step"] for row in moment.rows if row.get("attempted", True)}
    end = min(later[-1], moment.step + _FAR)
    last_bad, last_attempt = -math.inf, moment.step
    for step, batch in enumerate(moment.later_batches(end), moment.step + 1):
        if example_of(batch) is not None:
            last_bad = step
        if step in later and last_bad <= last_attempt:
            return step
        if step in attempts:
            last_attempt = step
    return None
