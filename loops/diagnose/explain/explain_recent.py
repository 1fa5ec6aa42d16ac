"""Explains a step right after it was taken, in the process that takes the steps."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.explain.at_hand import Recent, at_hand, scalers_in
from loops.diagnose.explain.explain_step import explain_step
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.sentence import describe
from loops.loop.calls import TrainStepFunction
from loops.loop.loop import Loop
from loops.support.text import amount


def explain_recent(loop: Loop, recent: Recent, seconds: float) -> Explanation:
    """Explains a step that a loop has just taken, and puts everything back.

    Args:
        loop: The loop, between two calls.
        recent: The step.
        seconds: After this time no further remedy is tried.
    """
    end = time.monotonic() + seconds
    with at_hand(loop, recent) as point:
        found = explain_step(point, in_time=lambda: time.monotonic() < end)
        if not recent.scales:
            # It was repeated at the scale of today, and its own is not known.
            found = dataclasses.replace(found, loss_scale=None)
            found = dataclasses.replace(found, sentence=describe(found))
        said = [_of_first_share(found, scalers_in(loop)) if point.alone else found.sentence]
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
    return f"{found.sentence} Only the share of the batch that replica 0 takes was looked at."


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
