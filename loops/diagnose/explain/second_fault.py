"""Finds a second fault behind a bad batch: later skips of the same streak, of steps whose own batches are finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from loops.diagnose.explain.examples import example_of
from loops.diagnose.explain.explain_step import explain_step
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.sentence import began
from loops.support.errors import LoopError
from loops.support.text import agreeing

_FAR = 1000
"""Batches of so many further steps are looked at."""


def second_fault(
    moment: Any, first: Explanation, later: Sequence[int], progress: Callable[[], None]
) -> Explanation | None:
    """Explains the first later skip that its own batch does not explain, and adds why the streak began.

    Args:
        moment: The run just before the step where the streak began. It cannot be used afterwards.
        first: The explanation of that step, whose batch was at fault.
        later: The numbers of the later skips in the streak.
        progress: Called before each attempt.

    Returns:
        None if every later skip may have the same reason, a lower loss scale helps, or the data cannot be read again.
    """
    try:
        step = step_with_finite_batches(moment, later)
        found = None if step is None else explain_step(moment.ahead(step), progress)
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
