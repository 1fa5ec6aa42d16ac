"""Explains a past step of a run, or chooses the step to explain from the run's log.

Finds a second fault behind a bad batch: later skips of the same streak, of steps whose own batches are finite.

Explains a step right after it was taken, in the process that takes the steps.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import scaler
from loops.actions.checkpoint import Checkpoint
from loops.diagnose.advice import without_advice
from loops.diagnose.explain.at_hand import Recent, at_hand, scalers_in
from loops.diagnose.explain.attempts import Attempts, Progress, attempts_at
from loops.diagnose.explain.examples import example_of
from loops.diagnose.explain.explain_step import explain_step
from loops.diagnose.explain.explanation import Explanation, began, describe
from loops.loop.calls import TrainStepFunction
from loops.loop.loop import Loop
from loops.record.files import TRACE, counted_in
from loops.record.log import read_columns
from loops.record.reading import read_steps
from loops.record.skips import SHARE, Health, health, in_words, not_logged, what_is_wrong
from loops.record.steps import Counted, Recorded
from loops.record.trace import Trace
from loops.run.rewind.rewind import log_of
from loops.support.errors import LoopError
from loops.support.text import agreeing, amount

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
        recorded = _steps(loop, folder)
        found = health(recorded, _counted(loop, recorded.step.tolist()), traced=recorded.traced)
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


def _steps(loop: Loop, run: pathlib.Path | None) -> Recorded:
    """The steps in the run's log, and those in its trace if it has one."""
    log = log_of(loop, run)
    traces = [action.writes.path for action in loop.actions if isinstance(action, Trace)]
    trace = next(iter(traces), run / TRACE if run else None)
    return read_steps(trace, log)


def _counted(loop: Loop, steps: Sequence[int]) -> Counted | None:
    saves = next((action for action in loop.actions if isinstance(action, Checkpoint)), None)
    return counted_in(saves.place, steps) if saves else None


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


def explain_recent(loop: Loop, recent: Recent, seconds: float) -> Explanation:
    """Explains a step that a loop has just taken, and puts everything back.

    Args:
        loop: The loop, between two calls.
        recent: The step.
        seconds: After this time no further remedy is tried.
    """
    end = time.monotonic() + seconds
    with at_hand(loop, recent) as point:
        found = explain_step(Attempts(point, in_time=lambda: time.monotonic() < end))
        if not recent.scales:
            # It was repeated at the scale of today, and its own is not known.
            found = dataclasses.replace(found, loss_scale=None)
        said = [_of_first_share(found, scalers_in(loop)) if point.alone else describe(found)]
        if found.growth is not None and found.verdict != "update":
            said.append("Lower learning rates of earlier steps were not tried: `halfstep explain` repeats these steps.")
        if time.monotonic() >= end:
            said.append(f"Not everything was tried: the time of {amount(seconds, 'second', 'g')} was over.")
    return dataclasses.replace(found, sentence=" ".join(said))


def _of_first_share(found: Explanation, scalers: list[scaler.LossScaler]) -> str:
    if found.verdict == "healthy":
        reasons = " ".join(one.explain() for one in scalers if int(one.counters.consecutive_skips))
        return (
            f"Step {found.step} was skipped, but the share of the batch that replica 0 takes passes alone, up to its "
            f"gradients. {reasons}".rstrip()
        )
    return f"{describe(found)} Only the share of the batch that replica 0 takes was looked at."


def explain_batch(train_step: TrainStepFunction, batch: Any, *, seconds: float = 60.0) -> Explanation:
    """Explains the step that was just skipped, for a program that calls its train step by itself.

        outputs = train_step(batch)
        if not outputs["applied"]:
            print(loops.observe.explain_batch(train_step, batch).sentence)

    The step is repeated on its batch, at the loss scale that it had, and everything is put back bit for bit. A `Loop`
    does the same by itself with `loops.Explain()` among its actions.

    Args:
        train_step: What a `Loop` takes: a callable from a batch, or from its parts, to a dict of tensors. Its loss
            scaler must have skipped its last step, and the weights must be as that step left them.
        batch: The batch of that step. A list of parts is taken as a tuple.
        seconds: After this time no further remedy is tried. What is needed to say where it began takes its time.

    Raises:
        scaler.InvalidArgument: If no loss scaler of the step has skipped its last step.
        LoopError: If the step keeps something that cannot be put back, such as what Python keeps for it.
    """
    data = tf.data.Dataset.from_tensors(_with_tuples(batch)).repeat()
    loop = Loop(train_step, data, steps_per_call=1)
    scalers = scalers_in(loop)
    stuck = [one for one in scalers if int(one.counters.consecutive_skips)]
    if not stuck:
        raise scaler.InvalidArgument(
            "explain_batch(train_step): expected a step whose loss scaler has just skipped: call it right after a step "
            "that was not applied."
        )
    scales = [(one, float(one.last_skip.loss_scale)) for one in stuck]
    step = max(int(one.counters.attempted) for one in stuck)
    held = next(iter(data))
    return explain_recent(loop, Recent(step, held, scales, {"step": step, "applied": False}), seconds)


def _with_tuples(batch: Any) -> Any:
    """The batch with tuples for lists of parts, which a dataset would stack to one tensor."""
    if isinstance(batch, dict):
        return {key: _with_tuples(part) for key, part in batch.items()}
    if isinstance(batch, list) and any(hasattr(part, "shape") or isinstance(part, (dict, list)) for part in batch):
        return tuple(map(_with_tuples, batch))
    return batch
