"""A loss scale that collapses as the run diverges, and what helps: floors, hysteresis, a guard, going back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.effects import networks
from benchmarks.effects.collapse_runs import (
    BACK,
    FALLEN,
    FLOOR,
    GUARD,
    GUESS,
    HYSTERESIS,
    INTERVAL,
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
from benchmarks.effects.saved_run import EVERY, Course

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
            batch=networks.BATCH,
            rate=RATE,
            calm=runs.calm,
            growth_percent=100 * (runs.growth - 1),
            every=EVERY,
            interval=INTERVAL,
            fallen=FALLEN,
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
                "as the run diverges its loss scale crashes to 0: that of `scaler.Dynamic` to the floor of these runs, "
                "2^-126, in each seed.",
                bool((ends[NONE] == -126).all() and not any(np.isfinite(each.loss[-1]) for each in plain)),
            ),
            Claim(
                f"under OPT's own rule, too, it crashes to 0: here it ends at {power(ends[METASEQ])}, which is "
                "the floor of metaseq's code and of our preset, so that nothing can fall to 0.",
                None if (ends[METASEQ] == np.log2(OPTS_FLOOR)).all() else False,
            ),
            Claim(
                f"the scale falls before the last step is applied, in each seed ({signed(lead, 'sooner', 'later')}).",
                bool((lead > 0).all()),
                published=False,
            ),
            Claim(
                f"the scale falls before the loss has risen, in each seed ({signed(rise, 'sooner', 'later')}; risen "
                f"is a mean over {EVERY} steps of {RISEN} times the least before, both ours).",
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
                "a lower rate from an earlier checkpoint lets the run go on: from before the fall of the scale it ends "
                f"within {100 * _ENOUGH:.0f} points (our bound) of one whose rate never rose, on average.",
                bool(back.mean() >= best.mean() - _ENOUGH),
            ),
            Claim(
                "OPT's limit finds such a checkpoint: under OPT's rule, from the newest save with a scale of 1 or "
                f"more, it ends within {100 * _ENOUGH:.0f} points, on average ({percent(opts)}). That is one of their "
                "two conditions: that activation norms go down from there was not looked at.",
                True if opts.mean() >= best.mean() - _ENOUGH else None,
            ),
            Claim(
                "the lower rate alone does not let the run go on: from the crash it ends more than "
                f"{100 * _ENOUGH:.0f} points below, in "
                "each seed.",
                bool((crash < best - _ENOUGH).all()),
                published=False,
            ),
            Claim(
                "going back alone does not let it go on: at the same rates the run diverges again in each seed, "
                "though its batches are others.",
                bool(all(not np.isfinite(each.loss[-1]) for each in courses_of(runs.other))),
                published=False,
            ),
            Claim(
                f"a floor of 1 does not keep the run: it ends more than {100 * _ENOUGH:.0f} points below the calm one, "
                "in each seed.",
                bool((accuracy[FLOOR] < best - _ENOUGH).all()),
                published=False,
            ),
            Claim(
                "hysteresis does not keep the run: the last applied step lies within 20 steps (our bound) of that "
                "without, in each seed.",
                bool((np.abs(lasts[HYSTERESIS] - lasts[NONE]) <= 20).all()),
                published=False,
            ),
            Claim(
                f"a `SpikeGuard` tells earlier: `check` says that the run is stuck {spread(sooner, '.0f')} steps "
                "sooner than without, with a forward pass that is still finite, in each seed.",
                bool((sooner > 0).all() and all(np.isfinite(each.loss).all() for each in ramped[GUARD])),
                published=False,
            ),
            Claim(
                f"a `SpikeGuard` alone keeps the run: it ends within {100 * _ENOUGH:.0f} points of the calm one, on "
                "average.",
                bool(accuracy[GUARD].mean() >= best.mean() - _ENOUGH),
                published=False,
            ),
        ),
        remarks=_remarks(overflow, silence, restarts, (ramped[METASEQ], runs.calm), np.array(late)),
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


def _remarks(
    overflow: np.ndarray,
    silence: Sequence[int],
    restarts: np.ndarray,
    opts: tuple[Sequence[Course], int],
    late: np.ndarray,
) -> str:
    """What is said beside the claims.

    Args:
        overflow: Log2 of the scale at the first loss that is not finite, [seeds].
        silence: The skipped steps until `check` said that the run is stuck, of the seeds in which it did.
        restarts: The accuracies from each of `BACK`, [saves, seeds].
        opts: The runs under OPT's rule, and the steps of their calm phase.
        late: The steps from a scale below 1 to the last applied step under OPT's rule, [seeds].
    """
    first = np.log2([each.scale[0] for each in opts[0]])
    usual = np.array([usual_of(each, opts[1]) for each in opts[0]])
    steady = int((np.diff(restarts, axis=0) < 0).all(axis=0).sum())
    means = [f"{100 * mean:.0f} %" for mean in restarts.mean(axis=1)]
    return (
        "A loss scale says how large gradients are. As long as the forward pass is finite, here until the "
        f"scale is {power(overflow)}, one that falls octave by octave says that gradients grow. Once the forward pass "
        "overflows, no scale is small enough: nearly all steps are skipped, the weights stay as they are, and the "
        "scale falls by an octave a step whatever gradients are. None of the rules that were tried here keeps a run "
        "that its learning rate destroys; to reset the scale, as OPT's authors did, was not tried. The loss tells "
        "earlier here. Without somebody who looks, the rest of the run "
        "is silence; `LossScaler.check`, which a `Loop` calls, ends it after "
        f"{spread(silence, '.0f') if silence else 'no'} skipped steps. (Here the runs go on, to show where the scale "
        "ends.) A floor hides how far it went.\n\n"
        "The save to go back to is one from before the fall. On average later ones are worse, as the right panel "
        f"shows: {', '.join(means)} correct from {', '.join(map(str, BACK))} steps before the crash, though all of "
        f"these saves are finite; in {steady} of {restarts.shape[1]} seeds each ten steps cost accuracy. To read from "
        "the scale which save is good is OPT's idea, and it matters how low the limit is. Under their own rule the "
        f"scale begins at {power(first)} here, has climbed to {power(usual)} in the second half of the calm phase, "
        "and goes below their limit sooner or later than the last applied step "
        f"({signed(late, 'before', 'after')}). "
        "`SpikeGuard` holds the weights and says early that something is wrong, and cannot repair it: the rate has to "
        "come down. `loops.Rewind` leaves batches out, which is right where batches are to blame, and ends with an "
        "error after it went back `most` times where they are not."
    )


EXPERIMENT = Experiment(NAME, "a loss scale that collapses before a crash, and what helps", 400, run, seeds=5)
