"""Explains a past step of a run, or chooses the step to explain from the run's log."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from loops.actions.checkpoint import Checkpoint
from loops.diagnose.advice import without_advice
from loops.diagnose.explain.explain_step import explain_step
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.second_fault import second_fault
from loops.loop.loop import Loop
from loops.record.files import TRACE
from loops.record.log import read_columns, read_log
from loops.record.reading import read_steps
from loops.record.run_metadata import counted_in
from loops.record.skips import SHARE, Health, health, in_words, not_logged, what_is_wrong
from loops.record.summary import rows_of
from loops.record.thinned import Counted
from loops.record.trace import Trace
from loops.run.rewind.rewind import log_of, rewind
from loops.support.errors import LoopError

Progress = Callable[[str], object]


def replay_progress(progress: Progress) -> Callable[[int, int], object]:
    """Reports how many steps were replayed."""
    return lambda done, total: progress(f"replayed {done} of {total} steps")


def attempt_progress(progress: Progress) -> Callable[[], None]:
    """Reports how many times the step was repeated."""
    taken = 0

    def count() -> None:
        nonlocal taken
        taken += 1
        progress(f"ran the step {taken} times")

    return count


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
    found = None
    if step is None:
        rows, traced = _rows(loop, None if run is None else pathlib.Path(run))
        found = health(rows, _counted(loop, [row["step"] for row in rows]), traced=traced)
        step = found.step or found.last
        if not step:
            raise LoopError(
                "there is no log of the run to choose a step from: name one with step= (on the command line --step), "
                "or let the run write a log with loops.JsonLines."
            )
    moment = rewind(
        loop,
        step,
        run=None if run is None else pathlib.Path(run),
        at_least=_REPLAYED,
        progress=replay_progress(progress),
    )
    count = attempt_progress(progress)
    explanation = explain_step(moment, count, remedies=found is None or not found.healthy)
    if found and found.later and explanation.where == "data":
        explanation = second_fault(moment, explanation, found.later, count) or explanation
    explanation = _with_health(explanation, found) if found else explanation
    damage = _damage(log_of(loop, None if run is None else pathlib.Path(run)))
    return dataclasses.replace(explanation, sentence=" ".join([explanation.sentence, *damage]))


def _damage(log: pathlib.Path | None) -> list[str]:
    """What of the log could not be read, as sentences."""
    return read_columns(log).damage(log.name, "it counts as unknown") if log is not None and log.is_file() else []


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


def _rows(loop: Loop, run: pathlib.Path | None) -> tuple[list[dict[str, Any]], bool]:
    """The steps in the run's log, and those in its trace if it has one; whether there are some of a trace."""
    log = log_of(loop, run)
    traces = [action.writes.path for action in loop.actions if isinstance(action, Trace)]
    trace = next(iter(traces), run / TRACE if run else None)
    if trace is not None:
        recorded = read_steps(trace, log)
        if recorded.traced:
            return rows_of(recorded), True
    return read_log(log), False


def _counted(loop: Loop, steps: Sequence[int]) -> Counted | None:
    saves = next((action for action in loop.actions if isinstance(action, Checkpoint)), None)
    return counted_in(saves.place, steps) if saves else None
