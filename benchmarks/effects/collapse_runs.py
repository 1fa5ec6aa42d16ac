"""Runs whose learning rate rises until they diverge, what tells first, and runs that go on from their saves."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

import scaler
from benchmarks.effects import networks
from benchmarks.effects.saved_run import EVERY, Course, SavedRun

RATE = 1e-3
_RAMP = 1.5**30
"""The factor on the learning rate by the end of a run."""
INTERVAL = 50
_LOWEST = 2.0**-126
GUESS = math.log(networks.SIZES[-1])
FALLEN = 2
"""Octaves below its usual value by which a scale has begun to fall."""
RISEN = 2
"""How many times its least mean a loss has when it has risen."""
OPTS_LIMIT = 1.0
"""OPT's authors called a scale healthy from here on."""
OPTS_FLOOR = 2.0**-5
"""The least scale under OPT's own rule."""
BACK = (40, 30, 20, 10, 0)
"""Restart points, in steps before the save that precedes the last applied step."""
NONE, FLOOR, HYSTERESIS, METASEQ, GUARD = WAYS = (
    "no floor",
    "a floor of 1",
    "hysteresis of 4",
    "metaseq's rule",
    "SpikeGuard",
)


class Fall(NamedTuple):
    """When a run diverged, in steps; the number of all steps for what did not happen.

    Attributes:
        scale: From here on the scale is two octaves below its usual value, or lower.
        limit: From here on the scale is below 1.
        rise: By here the mean loss of `EVERY` steps is twice the least of those before, or not finite, and so is each
            later mean.
        guess: From here on each loss is worse than a guess, or not finite.
        overflow: The first loss that is not finite.
        last: The last applied step, -1 if there is none.
    """

    scale: int
    limit: int
    rise: int
    guess: int
    overflow: int
    last: int


class Restart(NamedTuple):
    """A run from a save: the number of the save, `EVERY` steps each, and what followed."""

    save: int
    course: Course


class Runs(NamedTuple):
    """All runs, with an entry for each seed.

    Attributes:
        calm: The steps before the rate rises.
        growth: The factor on the rate at each save after them.
        ramped: The runs with a rising rate, of each of `WAYS`.
        level: The runs whose rate never rises, without a floor.
        healthy: From before the fall of the scale, at the calm rate.
        limited: From the newest save of the run under OPT's rule at which the scale is `OPTS_LIMIT` or more, at the
            calm rate.
        other: From before the fall of the scale, at the same rates with other batches.
        again: From each of `BACK`, at the calm rate, [seeds][saves].
    """

    calm: int
    growth: float
    ramped: dict[str, list[Course]]
    level: list[Course]
    healthy: list[Restart]
    limited: list[Restart]
    other: list[Restart]
    again: list[list[Restart]]


def train(seeds: int, steps: int) -> Runs:
    """Trains with a learning rate that rises until the run diverges, and then goes back to saves of that run.

    Args:
        seeds: The number of networks for each way.
        steps: The steps of each run.
    """
    count = max(steps // EVERY, 4)
    calm = count // 4
    rates = [RATE * _RAMP ** (max(number - calm + 1, 0) / (count - calm)) for number in range(count)]
    flat = [RATE] * count
    made = {name: SavedRun(strategy) for name, strategy in _strategies().items()}
    ramped = {name: [each.run(rates, seed) for seed in range(seeds)] for name, each in made.items()}
    plain = made[NONE]
    runs = Runs(calm * EVERY, rates[-1] / rates[-2], ramped, [], [], [], [], [])
    for seed, course in enumerate(ramped[NONE]):
        fall = fall_of(course, runs.calm)
        before = min(fall.scale // EVERY, count - 1)
        ends = [max(max(fall.last, 0) // EVERY - back // EVERY, 0) for back in BACK]
        taken = {
            at: Restart(at, plain.run(flat[at:], seed, at * EVERY, course.saves[at * EVERY])) for at in {before, *ends}
        }
        runs.level.append(plain.run(flat, seed))
        runs.healthy.append(taken[before])
        opts = ramped[METASEQ][seed]
        above = min(fall_of(opts, runs.calm).limit // EVERY, count - 1)
        limited = made[METASEQ].run(flat[above:], seed, above * EVERY, opts.saves[above * EVERY])
        runs.limited.append(Restart(above, limited))
        runs.again.append([taken[at] for at in ends])
        changed = plain.run(rates[before:], seed, before * EVERY, course.saves[before * EVERY], batches=1)
        runs.other.append(Restart(before, changed))
    return runs


def usual_of(course: Course, calm: int) -> float:
    """Log2 of the median scale in the second half of the calm phase, which has so many steps."""
    return float(np.median(np.log2(course.scale[calm // 2 : calm])))


def fall_of(course: Course, calm: int) -> Fall:
    """When a run diverged whose calm phase has so many steps."""
    means = course.loss.reshape(-1, EVERY).mean(axis=1)
    lost = np.flatnonzero(~np.isfinite(course.loss))
    return Fall(
        scale=_for_good(np.log2(course.scale) <= usual_of(course, calm) - FALLEN),
        limit=_for_good(course.scale < OPTS_LIMIT),
        rise=min(EVERY * _for_good(~(means < RISEN * np.fmin.accumulate(means))) + EVERY - 1, len(course.loss)),
        guess=_for_good(~(course.loss <= GUESS)),
        overflow=int(lost[0]) if len(lost) else len(course.loss),
        last=int(np.flatnonzero(course.applied).max(initial=-1)),
    )


def _for_good(wrong: np.ndarray) -> int:
    """The first place from which all are true."""
    fine = np.flatnonzero(~wrong)
    return int(fine.max(initial=-1)) + 1


def _strategies() -> dict[str, scaler.Strategy]:
    def dynamic(min_scale: float = _LOWEST, hysteresis: int = 1) -> scaler.Dynamic:
        return scaler.Dynamic(min_scale=min_scale, growth_interval=INTERVAL, hysteresis=hysteresis)

    metaseq = scaler.presets.metaseq(growth_interval=INTERVAL, min_loss_scale=OPTS_FLOOR)
    ways = (dynamic(), dynamic(1.0), dynamic(hysteresis=4), metaseq, scaler.SpikeGuard(dynamic()))
    return dict(zip(WAYS, ways, strict=True))
