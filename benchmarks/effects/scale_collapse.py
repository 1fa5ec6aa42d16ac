"""A loss scale that collapses as the run diverges, and what helps: floors, hysteresis, a guard, going back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.effects import collapse_runs
from benchmarks.effects.collapse_runs import (
    BACK,
    EVERY,
    FLOOR,
    GUARD,
    HYSTERESIS,
    METASEQ,
    NONE,
    WAYS,
    Course,
    Restart,
    Runs,
    fall_of,
)
from benchmarks.effects.effect import Found, course_of, curve, flat, spread, with_range

_ENOUGH = 0.05
_POINTS = round(100 * _ENOUGH)
_LABELS = {NONE: "no floor (hidden by hysteresis)"}
"""What a legend says of a curve that lies below another one."""


def run(seeds: int, steps: int) -> Found:
    """Trains with a learning rate that rises until the run diverges, and then goes back to saves of that run.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    return found_of(collapse_runs.train(seeds, steps))


def found_of(runs: Runs) -> Found:
    """What its runs show.

    Args:
        runs: The runs.
    """
    ramped, plain = runs.ramped, runs.ramped[NONE]
    falls = {name: [fall_of(each, runs.calm) for each in courses] for name, courses in ramped.items()}
    accuracy = {name: accuracy_of(courses) for name, courses in ramped.items()}
    best = accuracy_of(runs.level)
    back, opts, rewound = (accuracy_of(courses_of(each)) for each in (runs.healthy, runs.limited, runs.other))
    restarts = np.array([accuracy_of(courses_of(row)) for row in runs.again]).T
    lead, rise, guess = (
        np.array([getattr(fall, what) + later - fall.scale for fall in falls[NONE]])
        for what, later in (("last", 1), ("rise", 0), ("guess", 0))
    )
    late = np.array([fall.last + 1 - fall.limit for fall in falls[METASEQ]])
    overflow = np.log2(
        [each.scale[min(fall.overflow, len(each.scale) - 1)] for each, fall in zip(plain, falls[NONE], strict=True)]
    )
    ends = {name: _ends(courses) for name, courses in ramped.items()}
    stuck = {name: [each.stuck for each in courses] for name, courses in ramped.items()}
    silence = [each.stuck - fall.last - 1 for each, fall in zip(plain, falls[NONE], strict=True) if each.stuck]
    never = len(plain[0].loss)
    sooner = np.subtract(*([at or never for at in stuck[name]] for name in (NONE, GUARD)))
    lasts = {name: np.array([fall.last for fall in falls[name]]) for name in WAYS}
    restarted = {
        "from before the fall, other batches, rising rate": runs.other,
        "from the crash, calm rate": [row[-1] for row in runs.again],
        "from OPT's limit, OPT's rule, calm rate": runs.limited,
        "from before the fall, calm rate": runs.healthy,
        "calm rate throughout": [Restart(0, each) for each in runs.level],
    }
    return Found(
        words={
            "calm": runs.calm,
            "chance": collapse_runs.GUESS,
            "growth": runs.growth - 1,
            "overflow": power(overflow),
            "usual": power(np.array([collapse_runs.usual_of(each, runs.calm) for each in plain])),
            "end": power(ends[NONE]),
            "metaseq_end": power(ends[METASEQ]),
            "silence": spread(silence, ".0f") if silence else "no",
            "means": ", ".join(f"{100 * mean:.0f} %" for mean in restarts.mean(axis=1)),
            "back": ", ".join(map(str, BACK)),
            "first": power(np.log2([each.scale[0] for each in ramped[METASEQ]])),
            "late": signed(late, "before", "after"),
            "back_accuracy": back,
            "best": best,
            "opts": opts,
            "lead": lead,
            "said_lead": signed(lead, "sooner", "later"),
            "said_rise": signed(rise, "sooner", "later"),
            "said_guess": signed(guess, "sooner", "later"),
            "sooner": sooner,
        },
        rows=[
            (name, power(ends[name]), spread(lasts[name] + 1, ".0f"), when(stuck[name]), accuracy[name])
            for name in WAYS
        ]
        + [(name, power(_ends(courses_of(each))), *rest_of(each)) for name, each in restarted.items()],
        holds={
            "crashes": (ends[NONE] == -126).all() and not any(np.isfinite(each.loss[-1]) for each in plain),
            "metaseq": None if (ends[METASEQ] == np.log2(collapse_runs.OPTS_FLOOR)).all() else False,
            "last": lead > 0,
            "rise": rise > 0,
            "guess": guess > 0,
            "back": back.mean() >= best.mean() - _ENOUGH,
            "limit": True if opts.mean() >= best.mean() - _ENOUGH else None,
            "crash": restarts[-1] < best - _ENOUGH,
            "other": [not np.isfinite(each.loss[-1]) for each in courses_of(runs.other)],
            "floor": accuracy[FLOOR] < best - _ENOUGH,
            "hysteresis": np.abs(lasts[HYSTERESIS] - lasts[NONE]) <= 20,
            "guard": (sooner > 0).all() and all(np.isfinite(each.loss).all() for each in ramped[GUARD]),
            "guarded": accuracy[GUARD].mean() >= best.mean() - _ENOUGH,
        },
        lines=[
            [course_of(_LABELS.get(name, name), np.log2([each.scale for each in ramped[name]]).T) for name in WAYS],
            (
                course_of("no floor", np.array([each.loss for each in plain]).T),
                course_of("SpikeGuard", np.array([each.loss for each in ramped[GUARD]]).T),
                course_of("back, calm rate", joined(plain, runs.healthy)),
            ),
            [curve("accuracy", BACK[::-1], restarts[::-1])],
        ],
        measured=flat(
            {
                "accuracy": {
                    **accuracy,
                    "calm": best,
                    "from before the fall, calm": back,
                    "from OPT's limit, calm": opts,
                    "from before the fall, other batches": rewound,
                    **{f"from {at} steps before the crash": restarts[row] for row, at in enumerate(BACK)},
                },
                "log2 of the scale at the first loss that is not finite": overflow,
                "steps from the fall of the scale to the last applied step": lead,
                "steps from the fall of the scale to a loss that rises": rise,
                "steps from the fall of the scale to a loss worse than a guess": guess,
                "last applied step": lasts,
            }
        ),
    )


def _ends(courses: Sequence[Course]) -> np.ndarray:
    """Log2 of the scale of each run in the end."""
    return np.log2([each.scale[-1] for each in courses])


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


def rest_of(restarted: Sequence[Restart]) -> tuple[str, str, np.ndarray]:
    """The last applied steps, when they were found stuck and the accuracy, of runs that begin at saves."""
    courses = courses_of(restarted)
    last = [each.save * EVERY + int(np.flatnonzero(each.course.applied).max(initial=-1)) + 1 for each in restarted]
    until = spread(last, ".0f") if any(each.applied.any() for each in courses) else "none"
    return until, when([each.stuck for each in courses]), accuracy_of(courses)


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
