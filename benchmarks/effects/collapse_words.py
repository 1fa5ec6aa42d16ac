"""Numbers of runs whose scale collapsed, and how they are put into words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.effects.collapse_runs import Restart
from benchmarks.effects.effect import percent, spread, with_range
from benchmarks.effects.saved_run import EVERY, Course


def accuracy_of(courses: Sequence[Course]) -> np.ndarray:
    """The held-out accuracy of each run."""
    return np.array([each.accuracy for each in courses])


def courses_of(restarted: Sequence[Restart]) -> list[Course]:
    """What followed each save."""
    return [each.course for each in restarted]


def joined(courses: Sequence[Course], restarted: Sequence[Restart]) -> np.ndarray:
    """The losses of runs that go on from a save, with those before it, [steps, seeds]."""
    return np.array(
        [
            np.concatenate([one.loss[: then.save * EVERY], then.course.loss])
            for one, then in zip(courses, restarted, strict=True)
        ]
    ).T


def rest_of(restarted: Sequence[Restart]) -> tuple[str, str, str]:
    """The last applied steps, when they were found stuck and the accuracy, of runs that begin at saves."""
    courses = courses_of(restarted)
    last = [each.save * EVERY + int(np.flatnonzero(each.course.applied).max(initial=-1)) + 1 for each in restarted]
    until = spread(last, ".0f") if any(each.applied.any() for each in courses) else "none"
    return until, when([each.stuck for each in courses]), percent(accuracy_of(courses))


def power(exponents: np.ndarray) -> str:
    """A mean power of two with the least and the greatest."""
    return with_range(*(f"2^{round(value)}" for value in (exponents.mean(), exponents.min(), exponents.max())))


def signed(steps: np.ndarray, before: str, after: str) -> str:
    """How many steps something comes before something else, or after it where they are negative."""
    if (steps >= 0).all() or (steps <= 0).all():
        return f"{spread(np.abs(steps), '.0f')} steps {after if steps.mean() < 0 else before}"
    mean = f"{abs(steps.mean()):.0f} {after if steps.mean() < 0 else before}"
    return f"from {steps.max()} steps {before} to {-steps.min()} {after}, {mean} on average"


def when(stuck: list[int | None]) -> str:
    """The step at which runs were found stuck, and how many of them were."""
    known = [at for at in stuck if at is not None]
    some = "" if len(known) == len(stuck) else f" ({len(known)} of {len(stuck)} seeds)"
    return f"step {spread(known, '.0f')}{some}" if known else "no"
