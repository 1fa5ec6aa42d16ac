"""The autopsy of a past step, or of a whole run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

from loops.diagnose.advice import without_advice
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.look import look
from loops.loop.loop import Loop
from loops.record.log import read_log
from loops.record.skips import SHARE, Health, health, in_words, what_is_wrong
from loops.run.rewind.rewind import log_of, rewind
from loops.support.errors import LoopError

Progress = Callable[[str], object]


def of_steps(progress: Progress) -> Callable[[int, int], object]:
    """Tells of the steps that are replayed."""
    return lambda done, total: progress(f"replayed {done} of {total} steps")


def counted(progress: Progress) -> Callable[[], None]:
    """Tells how often the step was taken."""
    taken = 0

    def told() -> None:
        nonlocal taken
        taken += 1
        progress(f"took the step {taken} times")

    return told


_COURSE = 10
"""Steps before the one explained in which a lower learning rate may keep the weights from going bad."""


@without_advice()
def explain(
    loop: Loop, step: int | None = None, *, run: str | os.PathLike | None = None, progress: Progress = lambda text: None
) -> Explanation:
    """Explains why a step was skipped, by taking it again.

    Args:
        loop: As the program made it, with the run's `Checkpoint` among its actions; nothing is written, and no action
            acts. It is used up.
        step: Counted from 1 in batches, as the log counts. Without it the log is looked at: the step in which what went
            wrong last began, or the run is told to be healthy.
        run: The folder with the log `steps.jsonl`, where the loop has no `JsonLines`.
        progress: Called now and then with what is done.

    Raises:
        scaler.InvalidArgument: For a step that the run did not take, or a loop that cannot be rewound.
        LoopError: If the run cannot be had again.
    """
    found = None
    if step is None:
        found = health(read_log(log_of(loop, None if run is None else pathlib.Path(run))))
        step = found.step or found.steps
        if not step:
            raise LoopError(
                "there is no log of the run to choose a step from: name one with step= (on the command line --step), "
                "or have the run write a log, with loops.JsonLines."
            )
    moment = rewind(
        loop, step, run=None if run is None else pathlib.Path(run), at_least=_COURSE, progress=of_steps(progress)
    )
    explanation = look(moment, counted(progress), remedies=found is None or not found.healthy)
    return _judged(explanation, found) if found else explanation


def _judged(explanation: Explanation, found: Health) -> Explanation:
    if not found.healthy:
        told = f"{explanation.sentence} {what_is_wrong(found)}".rstrip()
        return dataclasses.replace(explanation, sentence=told)
    # A look at the step may know better than the log, which has no causes of some programs.
    if explanation.verdict != "healthy" and not explanation.scale_was_too_high:
        return explanation
    told = f"Nothing is wrong: {in_words(found)}."
    if found.skips and explanation.fits_at is not None:
        told += f" The last was step {explanation.step}, which passes at a loss scale of {explanation.fits_at:g}."
    if found.of_growth > SHARE * found.steps:
        told += " A longer growth interval skips less often."
    if explanation.differs:
        told += f" The replay is not the run: {explanation.differs}"
    return dataclasses.replace(explanation, verdict="healthy", sentence=told)
