"""Loss spikes of a second moment that is out of date: beta2, gradient clipping and StableAdamW; and Adam's epsilon."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.effects import adam_copies, networks
from benchmarks.effects.adam_copies import CLIP_NORM, CLIPPED, PLAIN, STABLE, Curves, Setup
from benchmarks.effects.effect import Found, Line, curve, curves, flat, spread

BETAS = (0.9, 0.99, 0.999)
EPSILONS = tuple(10.0**power for power in range(-8, 0))
NEAR = 0.01
"""A limit on gradients that is a few times their norm before the change."""
WIDE, NARROW = (f"clipped to {limit:g}" for limit in (CLIP_NORM, NEAR))
_SETTINGS = {PLAIN: (PLAIN, CLIP_NORM), WIDE: (CLIPPED, CLIP_NORM), NARROW: (CLIPPED, NEAR), STABLE: (STABLE, 1.0)}
WAYS = tuple(_SETTINGS)
_RATE = 3e-3
_QUIET = 0.01
_CALM = 2 / 3
"""The share of a run in which the loss is multiplied by `_QUIET`."""
_BEFORE = 5
"""The steps before the change that are drawn."""
JUMP = 2.0
"""An RMS that is as large is that of the change."""
_SETTLED = 1.2
"""The largest mean RMS before the change."""
SPIKE = 1.5
"""A spike is a loss that is so many times that before the change."""
SOON, AFTER = 20, 80
"""The steps after the change in which a spike is looked for, and all in which the loss is."""
PUBLISHED = (1, 8)
"""The steps from an under-estimate to a spike."""


class Spike(NamedTuple):
    """What a change did, float64 [seeds] each.

    Attributes:
        before: The mean RMS of g^2 / u in the last tenth of the quiet phase.
        jump: The largest of it in the loud phase.
        times: The largest held-out loss soon after the change over that before it.
        later: The same of the steps behind.
        lag: The steps from the first RMS of `JUMP` or more to a loss halfway up to the largest; NaN without a spike,
            and if there is no such RMS before that.
        end: The held-out loss in the end.
    """

    before: np.ndarray
    jump: np.ndarray
    times: np.ndarray
    later: np.ndarray
    lag: np.ndarray
    end: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """The largest of `times` and `later`."""
        return np.maximum(self.times, self.later)


def spike_of(curves: Curves, setup: int, change: int) -> Spike:
    """What the change before this step did to one of the set-ups."""
    loss, rms = (np.asarray(values[:, setup], np.float64) for values in (curves.loss, curves.rms))
    loss = np.where(np.isfinite(loss), loss, np.inf)
    jumped = rms[change : change + SOON] >= JUMP
    first = np.where(jumped.any(axis=0), jumped.argmax(axis=0), np.nan)
    soon = loss[change : change + SOON]
    halfway = (soon >= (soon[0] + soon.max(axis=0)) / 2).argmax(axis=0)
    times = soon.max(axis=0) / soon[0]
    return Spike(
        before=rms[_last_of(change)].mean(axis=0),
        jump=rms[change:].max(axis=0),
        times=times,
        later=loss[change + SOON : change + AFTER].max(axis=0, initial=0) / soon[0],
        lag=np.where((halfway < first) | (times < SPIKE), np.nan, halfway - first),
        end=loss[-1],
    )


def run(seeds: int, steps: int) -> Found:
    """Trains with a loss that becomes a hundred times larger, and with epsilons that do not.

    Args:
        seeds: The number of networks for each optimizer.
        steps: The steps of each run.
    """
    change = int(_CALM * steps)
    changed = adam_copies.train(
        [Setup(_RATE, beta, way=way, limit=limit) for beta in BETAS for way, limit in _SETTINGS.values()],
        seeds=seeds,
        factors=[_QUIET] * change + [1.0] * (steps - change),
    )
    setups = [Setup(_RATE, 0.99, epsilon) for epsilon in EPSILONS]
    level = adam_copies.train(setups, seeds=seeds, factors=[_QUIET] * steps)
    return found_of(changed, level, change)


def found_of(changed: Curves, level: Curves, change: int) -> Found:
    """What its runs show.

    Args:
        changed: The runs with a change: for each of `BETAS` each of `WAYS`.
        level: The runs without: for each of `EPSILONS`.
        change: The first step with the larger loss.
    """
    cases = [(beta, way) for beta in BETAS for way in WAYS]
    spikes = {case: spike_of(changed, number, change) for number, case in enumerate(cases)}
    late = slice(-max(1, len(level.grad) // 10), None)
    grad, update = (np.asarray(values[late], np.float64).mean(axis=0) for values in (level.grad, level.update))
    share = update / update[0]
    above = [number for number, epsilon in enumerate(EPSILONS) if epsilon >= grad[number].max()]
    _, middle_beta, worst_beta = BETAS
    worst = {way: spikes[worst_beta, way] for way in WAYS}
    plain, wide, narrow, stable = worst.values()
    middle = spikes[middle_beta, PLAIN]
    lags = [seen.lag[np.isfinite(seen.lag)] for seen in (plain, middle)]
    # None is shorter than what is published. That of no spike is not as short.
    in_time = [lag <= PUBLISHED[1] for lag in lags]
    norm = np.asarray(changed.norm[:, cases.index((worst_beta, PLAIN))], np.float64)
    soon = norm[change : change + SOON]
    before = _last_of(change)
    return Found(
        words={
            "sizes": ", ".join(map(str, networks.SIZES)),
            "change": change,
            "worst_beta": worst_beta,
            "middle_beta": middle_beta,
            "worst": worst,
            "near_of_quiet": NEAR / norm[before].mean(),
            "plain": plain.times.mean(),
            "first_norm": soon[0],
            "largest_norm": soon.max(axis=0),
            "higher": (narrow.end > stable.end).sum(),
            "lag": _lag_of(plain.lag),
            "shares": ", ".join(f"{spread(share[at], '.2g')} at {EPSILONS[at]:.0e}" for at in above),
            "later_steps": AFTER - SOON,
            "settled": change - before.start,
            "in_time": [lag.sum() for lag in in_time],
            "spiked": list(map(len, in_time)),
            "smaller": (middle.times < plain.times).sum(),
            "gone": len(middle.times) - _risen(middle.times),
            "stable_risen": _risen(stable.times),
            "later": {way: _risen(seen.later) for way, seen in worst.items()},
            "less_in_all": (stable.whole < wide.whole).sum(),
            "lower": (stable.end < wide.end).sum(),
        },
        rows=(
            (f"{beta}", way, seen.before, seen.jump, seen.times, seen.later, _lag_of(seen.lag), seen.end)
            for (beta, way), seen in spikes.items()
        ),
        holds={
            "settled": [
                ((spikes[beta, PLAIN].before <= _SETTLED) & (spikes[beta, PLAIN].jump >= JUMP)).all() for beta in BETAS
            ],
            "spikes": plain.times >= SPIKE,
            "lag-worst": _in_all(in_time[0]),
            "lag-middle": _in_all(in_time[1]),
            "resolved": _resolved(middle.times, plain.times),
            "avoids": stable.times < SPIKE,
            "later": stable.later < SPIKE,
            "less": stable.times < wide.times,
            "less-in-all": stable.whole < wide.whole,
            "lower": _in_all(stable.end < wide.end),
            "narrow": narrow.whole < stable.whole,
            "epsilon": bool(above) and share[above] < 1,
        },
        lines=[
            *(
                [_around(way, values[:, cases.index((worst_beta, way))], change) for way in WAYS]
                for values in (changed.loss, changed.rms)
            ),
            curves(range(len(BETAS)), {way: [spikes[beta, way].times for beta in BETAS] for way in WAYS}),
            curves(EPSILONS, {"update": update, "gradient": grad}),
        ],
        measured=flat(
            {
                (what, way, "beta2", beta): getattr(spikes[beta, way], what)
                for beta, way in cases
                for what in Spike._fields
            }
        )
        | flat({"update epsilon": update, "gradient epsilon": grad}, [f"{epsilon:.0e}" for epsilon in EPSILONS]),
    )


def _last_of(change: int) -> slice:
    """The last tenth of the steps before the change."""
    return slice(change - max(1, change // 10), change)


def _lag_of(steps: np.ndarray) -> str:
    """Lags of seeds [seeds], and how many of them have one."""
    known = steps[np.isfinite(steps)]
    if not len(known):
        return "no early spike"
    return spread(known, ".0f") + ("" if len(known) == len(steps) else f" ({len(known)} of {len(steps)} seeds)")


def _risen(times: np.ndarray) -> int:
    """The number of seeds in which the loss is that of a spike."""
    return int((times >= SPIKE).sum())


def _resolved(low: np.ndarray, high: np.ndarray) -> bool | None:
    """Whether no spike is left of one [seeds]: a smaller one, or none before, cannot tell."""
    if not _risen(high):
        return None
    return True if not _risen(low) else None if (low < high).any() else False


def _in_all(found: np.ndarray) -> bool | None:
    """Whether something is so in all seeds: some of them cannot tell."""
    return bool(found.all()) if len(found) and (found.all() or not found.any()) else None


def _around(label: str, by_step: np.ndarray, change: int) -> Line:
    first, last = max(change - _BEFORE, 0), min(change + AFTER, len(by_step))
    return curve(label, np.arange(first, last) - change, by_step[first:last])
