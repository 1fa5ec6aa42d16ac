"""A loss scale that collapses as the run diverges, and what helps: floors, hysteresis, a guard, going back."""

from __future__ import annotations

import numpy as np

from benchmarks.effects.collapse_runs import (
    BACK,
    FALLEN,
    FLOOR,
    GUARD,
    GUESS,
    HYSTERESIS,
    METASEQ,
    NONE,
    OPTS_FLOOR,
    RATE,
    RISEN,
    WAYS,
    Restart,
    Runs,
    fall_of,
    train,
    usual_of,
)
from benchmarks.effects.collapse_words import accuracy_of, courses_of, joined, power, rest_of, signed, when
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, course_of, curve, described, percent, spread
from benchmarks.effects.saved_run import EVERY

NAME = "scale-collapse"
_ENOUGH = 0.05
_LABELS = {NONE: "no floor (hidden by hysteresis)"}
"""What a legend says of a curve that lies below another one."""


def run(seeds: int = 5, steps: int = 400) -> Effect:
    """Trains with a learning rate that rises until the run diverges, and then goes back to saves of that run.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    return effect_of(train(seeds, steps), seeds, steps)


def effect_of(runs: Runs, seeds: int, steps: int) -> Effect:
    """The effect from its runs.

    Args:
        runs: The runs.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    ramped, plain = runs.ramped, runs.ramped[NONE]
    falls = {name: [fall_of(each, runs.calm) for each in courses] for name, courses in ramped.items()}
    accuracy = {name: accuracy_of(courses) for name, courses in ramped.items()}
    best = accuracy_of(runs.level)
    back, opts, rewound = (accuracy_of(courses_of(each)) for each in (runs.healthy, runs.limited, runs.other))
    restarts = np.array([accuracy_of(courses_of(row)) for row in runs.again]).T
    crash = restarts[-1]
    lead = np.array([fall.last + 1 - fall.scale for fall in falls[NONE]])
    rise = np.array([fall.rise - fall.scale for fall in falls[NONE]])
    guess = np.array([fall.guess - fall.scale for fall in falls[NONE]])
    late = [fall.last + 1 - fall.limit for fall in falls[METASEQ]]
    usual = np.array([usual_of(each, runs.calm) for each in plain])
    overflow = np.log2(
        [each.scale[min(fall.overflow, len(each.scale) - 1)] for each, fall in zip(plain, falls[NONE], strict=True)]
    )
    ends = {name: np.log2([each.scale[-1] for each in courses]) for name, courses in ramped.items()}
    stuck = {name: [each.stuck for each in courses] for name, courses in ramped.items()}
    silence = [each.stuck - fall.last - 1 for each, fall in zip(plain, falls[NONE], strict=True) if each.stuck]
    sooner = np.array(
        [(one or steps) - (guarded or steps) for one, guarded in zip(stuck[NONE], stuck[GUARD], strict=True)]
    )
    lasts = {name: np.array([fall.last for fall in falls[name]]) for name in WAYS}
    table = [
        (name, power(ends[name]), spread(lasts[name] + 1, ".0f"), when(stuck[name]), percent(accuracy[name]))
        for name in WAYS
    ]
    table += [
        (name, power(np.log2([each.scale[-1] for each in courses_of(restarted)])), *rest_of(restarted))
        for name, restarted in (
            ("from before the fall, other batches, rising rate", runs.other),
            ("from the crash, calm rate", [row[-1] for row in runs.again]),
            ("from OPT's limit, OPT's rule, calm rate", runs.limited),
            ("from before the fall, calm rate", runs.healthy),
            ("calm rate throughout", [Restart(0, each) for each in runs.level]),
        )
    ]
    return Effect(
        **described(
            NAME,
            rate=RATE,
            calm=runs.calm,
            growth_percent=100 * (runs.growth - 1),
            every=EVERY,
            fallen=FALLEN,
            overflow=power(overflow),
            silence=spread(silence, ".0f") if silence else "no",
            means=", ".join(f"{100 * mean:.0f} %" for mean in restarts.mean(axis=1)),
            back=", ".join(map(str, BACK)),
            first=power(np.log2([each.scale[0] for each in ramped[METASEQ]])),
            late=signed(np.array(late), "before", "after"),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "the loss scale as the run diverges",
                "crashes to 0",
                f"from {power(usual)} to {power(overflow)} as the forward pass overflows, and to "
                f"{power(ends[NONE])}, its floor, in the steps that are skipped behind; under OPT's own rule to "
                f"{power(ends[METASEQ])}",
            ),
            (
                "an earlier checkpoint and a lower rate",
                "the run goes on",
                f"{percent(back)} correct in the end; {percent(best)} if the rate had never risen",
            ),
            (
                "the same from the newest save with a scale of 1 or more, under OPT's rule",
                "the run goes on, if activation norms go down",
                f"{percent(opts)} correct in the end",
            ),
            ("steps from the fall of the scale to the last applied step", "not given", spread(lead, ".0f")),
        ),
        columns=("way", "scale in the end", "applied steps until", "stuck, says `check`", "accuracy in the end"),
        rows=tuple(table),
        claims=(
            Claim(
                "as the run diverges `scaler.Dynamic`'s scale crashes, to the floor of these runs, in each seed.",
                bool((ends[NONE] == -126).all() and not any(np.isfinite(each.loss[-1]) for each in plain)),
            ),
            Claim(
                f"under OPT's own rule it crashes to 0 (here to metaseq's floor, {power(ends[METASEQ])}).",
                None if (ends[METASEQ] == np.log2(OPTS_FLOOR)).all() else False,
            ),
            Claim(
                f"the scale falls before the last step is applied, in each seed ({signed(lead, 'sooner', 'later')}).",
                bool((lead > 0).all()),
                published=False,
            ),
            Claim(
                f"the scale falls before the loss, a mean over {EVERY} steps, has risen to {RISEN} times its least "
                f"(our bounds), in each seed ({signed(rise, 'sooner', 'later')}).",
                bool((rise > 0).all()),
                published=False,
            ),
            Claim(
                "the scale falls before the loss is worse than a guess, in each seed "
                f"({signed(guess, 'sooner', 'later')}).",
                bool((guess > 0).all()),
                published=False,
            ),
            Claim(
                "a lower rate lets the run go on from before the fall: on average it ends within "
                f"{100 * _ENOUGH:.0f} points (our bound) of a calm one.",
                bool(back.mean() >= best.mean() - _ENOUGH),
            ),
            Claim(
                "so it does from OPT's limit.",
                True if opts.mean() >= best.mean() - _ENOUGH else None,
            ),
            Claim(
                "the lower rate alone does not: from the crash each run ends more than "
                f"{100 * _ENOUGH:.0f} points below.",
                bool((crash < best - _ENOUGH).all()),
                published=False,
            ),
            Claim(
                "going back alone does not: at the same rates and with other batches each run diverges again.",
                bool(all(not np.isfinite(each.loss[-1]) for each in courses_of(runs.other))),
                published=False,
            ),
            Claim(
                f"a floor of 1 does not keep the run: each ends more than {100 * _ENOUGH:.0f} points below.",
                bool((accuracy[FLOOR] < best - _ENOUGH).all()),
                published=False,
            ),
            Claim(
                "hysteresis does not: in each seed the last applied step is within 20 (our bound) of that without.",
                bool((np.abs(lasts[HYSTERESIS] - lasts[NONE]) <= 20).all()),
                published=False,
            ),
            Claim(
                f"with a `SpikeGuard` `check` reports each run {spread(sooner, '.0f')} steps sooner, while its forward "
                "pass is finite.",
                bool((sooner > 0).all() and all(np.isfinite(each.loss).all() for each in ramped[GUARD])),
                published=False,
            ),
            Claim(
                f"a `SpikeGuard` alone keeps the run within {100 * _ENOUGH:.0f} points, on average.",
                bool(accuracy[GUARD].mean() >= best.mean() - _ENOUGH),
                published=False,
            ),
        ),
        panels=(
            Panel(
                "loss scale",
                "step",
                "log2 of the loss scale",
                tuple(
                    course_of(_LABELS.get(name, name), np.log2([each.scale for each in ramped[name]]).T)
                    for name in WAYS
                ),
                reference=(-126.0, "the floor of these runs"),
            ),
            Panel(
                "loss of the batch",
                "step",
                "nats",
                (
                    course_of("no floor", np.array([each.loss for each in plain]).T),
                    course_of("SpikeGuard", np.array([each.loss for each in ramped[GUARD]]).T),
                    course_of("back, calm rate", joined(plain, runs.healthy)),
                ),
                log_y=10,
                reference=(GUESS, "a guess"),
            ),
            Panel(
                "going back, then the calm rate",
                "steps from the save to the crash",
                "held-out accuracy",
                (curve("accuracy", BACK[::-1], restarts[::-1]),),
                reference=(float(best.mean()), "calm throughout"),
            ),
        ),
        measured={f"accuracy {name}": values.tolist() for name, values in accuracy.items()}
        | {
            "accuracy calm": best.tolist(),
            "accuracy from before the fall, calm": back.tolist(),
            "accuracy from OPT's limit, calm": opts.tolist(),
            "accuracy from before the fall, other batches": rewound.tolist(),
            "log2 of the scale at the first loss that is not finite": overflow.tolist(),
            "steps from the fall of the scale to the last applied step": lead.tolist(),
            "steps from the fall of the scale to a loss that rises": rise.tolist(),
            "steps from the fall of the scale to a loss worse than a guess": guess.tolist(),
        }
        | {f"accuracy from {at} steps before the crash": restarts[row].tolist() for row, at in enumerate(BACK)}
        | {f"last applied step {name}": values.tolist() for name, values in lasts.items()},
    )


EXPERIMENT = Experiment(NAME, "a loss scale that collapses before a crash, and what helps", 400, run, seeds=5)
