"""A loss scale that collapses as the run diverges, and what helps: floors, hysteresis, a guard, going back."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

import scaler
from loops.study.effects import networks
from loops.study.effects.effect import Claim, Effect, Panel, Preset, course_of, curve, percent, spread
from loops.study.effects.saved_run import EVERY, Course, SavedRun

NAME = "scale-collapse"
_RATE = 1e-3
_RAMP = 1.5**30
"""The factor on the learning rate by the end of a run."""
_INTERVAL = 50
_LOWEST = 2.0**-126
_GUESS = math.log(networks.SIZES[-1])
_FALLEN = 2
"""Octaves below its usual value by which a scale has begun to fall."""
_BACK = (40, 30, 20, 10, 0)
"""Restart points, in steps before the save that precedes the last applied step."""
_ENOUGH = 0.05
_NONE, _FLOOR, _HYSTERESIS, _METASEQ, _GUARD = _WAYS = (
    "no floor",
    "a floor of 1",
    "hysteresis of 4",
    "metaseq's rule",
    "SpikeGuard",
)


class _Fall(NamedTuple):
    """When a run diverged, in steps; the number of all steps for what did not happen.

    Attributes:
        scale: From here on the scale is two octaves below its usual value, or lower.
        loss: From here on each loss is worse than a guess, or not finite.
        last: The last applied step.
    """

    scale: int
    loss: int
    last: int


def run(seeds: int = 5, steps: int = 400) -> Effect:
    """Trains with a learning rate that rises until the run diverges, and then goes back to saves of that run.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    count = max(steps // EVERY, 4)
    calm = count // 4
    rates = [_RATE * _RAMP ** (max(number - calm + 1, 0) / (count - calm)) for number in range(count)]
    flat = [_RATE] * count
    made = {name: SavedRun(strategy) for name, strategy in _strategies().items()}
    ramped = {name: [each.run(rates, seed) for seed in range(seeds)] for name, each in made.items()}
    level = [made[_NONE].run(flat, seed) for seed in range(seeds)]
    falls = {name: [_fall(each, calm * EVERY) for each in courses] for name, courses in ramped.items()}
    again, other, healthy = [], [], []
    for seed, (course, fall) in enumerate(zip(ramped[_NONE], falls[_NONE], strict=True)):
        end = max(fall.last, 0) // EVERY
        before = min(fall.scale // EVERY, count - 1)
        taken = {
            at: made[_NONE].run(flat[at:], seed, at * EVERY, course.saves[at * EVERY])
            for at in {before, count - 1, *(max(end - back // EVERY, 0) for back in _BACK)}
        }
        healthy.append((before, taken[before]))
        again.append([taken[max(end - back // EVERY, 0)] for back in _BACK] + [taken[count - 1]])
        other.append(made[_NONE].run(rates[before:], seed, before * EVERY, course.saves[before * EVERY], batches=1))

    accuracy = {name: np.array([each.accuracy for each in courses]) for name, courses in ramped.items()}
    best = np.array([each.accuracy for each in level])
    back = np.array([each.accuracy for _, each in healthy])
    rewound = np.array([each.accuracy for each in other])
    restarts = np.array([[each.accuracy for each in row[:-1]] for row in again]).T
    newest = [row[-1] for row in again]
    crash = falls[_NONE]
    lead = np.array([fall.last + 1 - fall.scale for fall in crash])
    ahead = np.array([fall.loss - fall.scale for fall in crash])
    usual = np.array([_usual(each, calm * EVERY) for each in ramped[_NONE]])
    ends = {name: np.log2([each.scale[-1] for each in courses]) for name, courses in ramped.items()}
    stuck = {name: [each.stuck for each in courses] for name, courses in ramped.items()}
    silence = {
        name: [each.stuck - fall.last - 1 for each, fall in zip(ramped[name], falls[name], strict=True) if each.stuck]
        for name in _WAYS
    }
    sooner = np.array(
        [(plain or steps) - (guarded or steps) for plain, guarded in zip(stuck[_NONE], stuck[_GUARD], strict=True)]
    )
    lasts = {name: np.array([fall.last for fall in falls[name]]) for name in _WAYS}
    same = _same(ramped[_FLOOR], ramped[_NONE])
    table = [
        (
            name,
            _power(ends[name]),
            spread(lasts[name] + 1, ".0f"),
            _when(stuck[name]),
            percent(accuracy[name]),
        )
        for name in _WAYS
    ]
    table += [
        (name, _power(np.log2([each.scale[-1] for each in courses])), *_rest(courses, starts))
        for name, courses, starts in (
            ("from before the fall, other batches, rising rate", other, [at for at, _ in healthy]),
            ("from the newest save, calm rate", newest, [count - 1] * seeds),
            ("from before the fall, calm rate", [each for _, each in healthy], [at for at, _ in healthy]),
            ("calm rate throughout", level, [0] * seeds),
        )
    ]
    return Effect(
        name=NAME,
        title="A loss scale that collapses before a crash",
        question="When a float16 run diverges, the dynamic loss scale goes down with it. Does it fall before the loss "
        "tells, and which of floors, hysteresis, a guard and going back keeps the run?",
        published="[Zhang et al. 2022](https://arxiv.org/abs/2205.01068): the loss of OPT-175B diverged while the "
        "dynamic loss scale crashed to 0. A lower learning rate, from an earlier checkpoint, let the run go on. The "
        "paper gives no count of steps.",
        design=f"Four dense layers of 32 units under `mixed_float16` (leaky ReLU, no normalisation) learn the digits "
        f"with Adam, in batches of {networks.BATCH}. The learning rate is {_RATE} for {calm * EVERY} steps, then rises "
        f"by {100 * (rates[-1] / rates[-2] - 1):.0f} % every {EVERY} steps. The scale is `scaler.Dynamic` with a "
        f"growth interval of {_INTERVAL}: with a floor of 2^-126, where float32 has its smallest normal number; with a "
        "floor of 1; with `hysteresis=4`; inside a `scaler.SpikeGuard`; and `scaler.presets.metaseq`, OPT's own rule, "
        f"with the same interval. All variables are saved every {EVERY} steps. From saves of the run without a floor "
        "it goes on: at the calm rate; or, as `loops.Rewind` does, at the same rates with other batches. Before the "
        f"fall: the newest save at which the scale is not yet {_FALLEN} octaves below its median of the calm phase "
        "for good.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "the loss scale as the run diverges",
                "crashes to 0",
                f"from {_power(usual)} to {_power(ends[_NONE])}",
            ),
            (
                "an earlier checkpoint and a lower rate",
                "the run goes on",
                f"{percent(back)} correct in the end; {percent(best)} if the rate had never risen",
            ),
            ("steps from the fall of the scale to the last applied step", "not given", spread(lead, ".0f")),
        ),
        columns=("way", "scale in the end", "applied steps until", "stuck, says `check`", "accuracy in the end"),
        rows=tuple(table),
        claims=(
            Claim(
                "as the run diverges its loss scale crashes to 0, here to the floor of these runs, 2^-126.",
                bool((ends[_NONE] == -126).all() and not any(np.isfinite(each.loss[-1]) for each in ramped[_NONE])),
            ),
            Claim(
                f"the scale falls before the last step is applied ({spread(lead, '.0f')} steps before).",
                bool((lead > 0).all()),
            ),
            Claim(
                "the scale falls before the loss is worse than a guess "
                f"({spread(ahead, '.0f')} steps before; negative: after).",
                bool((ahead > 0).all()),
            ),
            Claim(
                "a lower rate from an earlier checkpoint lets the run go on: from before the fall of the scale it ends "
                f"within {100 * _ENOUGH:.0f} points of one whose rate never rose, on average.",
                bool(back.mean() >= best.mean() - _ENOUGH),
            ),
            Claim(
                "the lower rate alone does not: from the newest save not one step is applied.",
                not any(each.applied.any() for each in newest),
            ),
            Claim(
                "going back alone does not: at the same rates the run diverges again, though its batches are others.",
                bool(all(not np.isfinite(each.loss[-1]) for each in other)),
            ),
            Claim(
                "a floor of 1 changes nothing but the number that is shown: the losses and the applied steps are the "
                "same as without it, bit for bit, as long as the scale is at least 1 there.",
                same and bool((ends[_FLOOR] == 0).all()),
            ),
            Claim(
                "hysteresis does not keep the run: the last applied step lies within 20 steps of that without.",
                bool((np.abs(lasts[_HYSTERESIS] - lasts[_NONE]) <= 20).all()),
            ),
            Claim(
                f"a `SpikeGuard` tells earlier: `check` says that the run is stuck {spread(sooner, '.0f')} steps "
                "sooner than without, with a forward pass that is still finite.",
                bool((sooner > 0).all() and all(np.isfinite(each.loss).all() for each in ramped[_GUARD])),
            ),
            Claim(
                f"a `SpikeGuard` alone keeps the run: it ends within {100 * _ENOUGH:.0f} points of the calm one.",
                bool(accuracy[_GUARD].mean() >= best.mean() - _ENOUGH),
            ),
        ),
        remarks="A loss scale says how large gradients are, so one that falls octave by octave says that they grow. It "
        "is a symptom: no rule for the scale keeps a run that its learning rate destroys. Once the forward pass "
        "overflows, no scale is small enough, each step is skipped and the weights stay as they are. Without somebody "
        f"who looks, the rest of the run is silence; `LossScaler.check`, which a `Loop` calls, ends it after "
        f"{spread(silence[_NONE], '.0f') if silence[_NONE] else 'no'} skipped steps. (Here the runs go on, to show "
        "where the scale ends.) A floor only hides how far it went.\n\nThe save to go back to is one from before the "
        "fall: each ten steps later cost accuracy, as the right panel shows, though all of these saves are finite and "
        "the steps after them are applied. The scale at a save tells which is which, without a look at the loss. "
        "`SpikeGuard` holds the weights and says early that something is wrong, and cannot repair it: the rate has to "
        "come down. `loops.Rewind` leaves batches out, which is right where batches are to blame, and ends with an "
        "error after it went back `most` times where they are not.",
        panels=(
            Panel(
                "loss scale",
                "step",
                "log2 of the loss scale",
                tuple(
                    course_of(name, np.log2([each.scale for each in ramped[name]]).T)
                    for name in (_NONE, _FLOOR, _METASEQ, _GUARD)
                ),
                reference=(-126.0, "published: to 0 (2^-126)"),
            ),
            Panel(
                "loss of the batch",
                "step",
                "nats",
                (
                    course_of("no floor", np.array([each.loss for each in ramped[_NONE]]).T),
                    course_of("SpikeGuard", np.array([each.loss for each in ramped[_GUARD]]).T),
                    course_of("back, calm rate", _joined(ramped[_NONE], healthy)),
                ),
                log_y=10,
                reference=(_GUESS, "a guess"),
            ),
            Panel(
                "going back, then the calm rate",
                "steps from the save to the last applied one",
                "held-out accuracy",
                (curve("accuracy", _BACK[::-1], restarts[::-1]),),
                reference=(float(best.mean()), "calm throughout"),
            ),
        ),
        measured={f"accuracy {name}": values.tolist() for name, values in accuracy.items()}
        | {
            "accuracy calm": best.tolist(),
            "accuracy from before the fall, calm": back.tolist(),
            "accuracy from before the fall, other batches": rewound.tolist(),
            "steps from the fall of the scale to the last applied step": lead.tolist(),
            "steps from the fall of the scale to a loss worse than a guess": ahead.tolist(),
        }
        | {f"accuracy from {at} steps before the crash": restarts[row].tolist() for row, at in enumerate(_BACK)}
        | {f"last applied step {name}": values.tolist() for name, values in lasts.items()},
    )


def _strategies() -> dict[str, scaler.Strategy]:
    def dynamic(min_scale: float = _LOWEST, hysteresis: int = 1) -> scaler.Dynamic:
        return scaler.Dynamic(min_scale=min_scale, growth_interval=_INTERVAL, hysteresis=hysteresis)

    metaseq = scaler.presets.metaseq(growth_interval=_INTERVAL)
    ways = (dynamic(), dynamic(1.0), dynamic(hysteresis=4), metaseq, scaler.SpikeGuard(dynamic()))
    return dict(zip(_WAYS, ways, strict=True))


def _usual(course: Course, calm: int) -> float:
    """Log2 of the median scale in the second half of the calm phase."""
    return float(np.median(np.log2(course.scale[calm // 2 : calm])))


def _fall(course: Course, calm: int) -> _Fall:
    low = np.log2(course.scale) <= _usual(course, calm) - _FALLEN
    applied = np.flatnonzero(course.applied)
    return _Fall(_for_good(low), _for_good(~(course.loss <= _GUESS)), int(applied.max(initial=-1)))


def _for_good(wrong: np.ndarray) -> int:
    """The first step from which all are true."""
    fine = np.flatnonzero(~wrong)
    return int(fine.max(initial=-1)) + 1


def _same(floored: list[Course], plain: list[Course]) -> bool:
    """Whether losses and decisions are the same while the scale of the second is at least 1."""
    parts = []
    for one, other in zip(floored, plain, strict=True):
        until = int(np.argmax(other.scale < 1)) or len(other.scale)
        parts += [
            np.array_equal(one.loss[:until], other.loss[:until], equal_nan=True),
            np.array_equal(one.applied[:until], other.applied[:until]),
        ]
    return all(parts)


def _joined(courses: list[Course], healthy: list[tuple[int, Course]]) -> np.ndarray:
    """The losses of runs that go on from a save, with those before it, [steps, seeds]."""
    return np.array(
        [np.concatenate([one.loss[: at * EVERY], then.loss]) for one, (at, then) in zip(courses, healthy, strict=True)]
    ).T


def _rest(courses: list[Course], starts: list[int]) -> tuple[str, str, str]:
    """The last applied steps, when they were found stuck and the accuracy, of runs that begin at these saves."""
    last = [
        at * EVERY + int(np.flatnonzero(each.applied).max(initial=-1)) + 1
        for each, at in zip(courses, starts, strict=True)
    ]
    until = spread(last, ".0f") if any(each.applied.any() for each in courses) else "none"
    return until, _when([each.stuck for each in courses]), percent([each.accuracy for each in courses])


def _power(exponents: np.ndarray) -> str:
    mean, low, high = (f"2^{value:.0f}" for value in (exponents.mean(), exponents.min(), exponents.max()))
    return mean if low == high else f"{mean} ({low} to {high})"


def _when(stuck: list[int | None]) -> str:
    known = [at for at in stuck if at is not None]
    some = "" if len(known) == len(stuck) else f" ({len(known)} of {len(stuck)} seeds)"
    return f"step {spread(known, '.0f')}{some}" if known else "no"


PRESET = Preset(NAME, "a loss scale that collapses before a crash, and what helps", 400, run, seeds=5)
