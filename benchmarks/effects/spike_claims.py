"""What is claimed of loss spikes after gradients have grown, and of epsilon."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.effects.adam_copies import CLIP_NORM, PLAIN, STABLE
from benchmarks.effects.effect import Claim, spread
from benchmarks.effects.loss_spike import AFTER, JUMP, SOON, SPIKE, Spike

BETAS = (0.9, 0.99, 0.999)
EPSILONS = tuple(10.0**power for power in range(-8, 0))
NEAR = 0.01
"""A limit on gradients that is a few times their norm before the change."""
WIDE, NARROW = (f"clipped to {limit:g}" for limit in (CLIP_NORM, NEAR))
SETTLED = 1.2
"""The largest mean RMS before the change."""
PUBLISHED = (1, 8)
"""The steps from an under-estimate to a spike."""


def claims_of(spikes: Mapping[tuple[float, str], Spike], shares: np.ndarray, settled: int) -> tuple[Claim, ...]:
    """What is claimed.

    Args:
        spikes: What the change did, for each of `BETAS` and each way.
        shares: Updates over those with the least epsilon, [epsilons, seeds]: of epsilons as large as the gradient.
        settled: The steps of which the mean RMS before the change is.
    """
    plain = {beta: spikes[beta, PLAIN] for beta in BETAS}
    middle, worst = BETAS[1:]
    stable, wide, narrow = (spikes[worst, way] for way in (STABLE, WIDE, NARROW))
    followed = {beta: plain[beta].lag[np.isfinite(plain[beta].lag)] for beta in (worst, middle)}
    low, high = plain[middle].times, plain[worst].times
    seeds = len(high)
    lower = stable.end < wide.end
    return (
        Claim(
            f"for each beta2 and seed AdamW's mean RMS is at most {SETTLED} (our bound) over {settled} steps before "
            f"the change, and its largest at least {JUMP:.0f} after.",
            all(((seen.before <= SETTLED) & (seen.jump >= JUMP)).all() for seen in plain.values()),
            published=False,
        ),
        Claim(f"with beta2 {worst} AdamW's loss spikes in each seed.", bool((high >= SPIKE).all())),
        *(
            Claim(
                f"with beta2 {beta} the lag is at most the published {PUBLISHED[1]} steps (in {_in_time(each).sum()} "
                f"of {len(each)} seeds with a spike).",
                _in_all(_in_time(each)),
                published=False,
            )
            for beta, each in followed.items()
        ),
        Claim(
            f"a beta2 of {middle} resolves the spike (it is smaller in {(low < high).sum()} of {seeds} seeds, and gone "
            f"in {seeds - risen(low)}).",
            _resolved(low, high),
        ),
        Claim(
            f"StableAdamW avoids the spike, with beta2 {worst} in each seed (above {SPIKE} times in "
            f"{risen(stable.times)} of {seeds}).",
            bool((stable.times < SPIKE).all()),
        ),
        Claim(
            f"so it does in the next {AFTER - SOON} steps, too (above in {risen(stable.later)} of {seeds}; AdamW in "
            f"{risen(plain[worst].later)}, clipped to {NEAR:g} in {risen(narrow.later)}).",
            bool((stable.later < SPIKE).all()),
            published=False,
        ),
        Claim(
            f"in the {SOON} steps its loss rises less than with gradients clipped to {CLIP_NORM:g}, in each seed.",
            bool((stable.times < wide.times).all()),
            published=False,
        ),
        Claim(
            f"so it does in all {AFTER} steps (in {(stable.whole < wide.whole).sum()} of {seeds}).",
            bool((stable.whole < wide.whole).all()),
            published=False,
        ),
        Claim(
            f"it ends with a lower loss than with gradients clipped to {CLIP_NORM:g} (in {lower.sum()} of {seeds} "
            "seeds).",
            _in_all(lower),
        ),
        Claim(
            f"over the {AFTER} steps the loss rises less with gradients clipped to {NEAR:g}, in each seed.",
            bool((narrow.whole < stable.whole).all()),
            published=False,
        ),
        Claim(
            "where epsilon is the gradient's root mean square or more, updates are smaller in each seed (nearly "
            "algebra).",
            bool(len(shares) and (shares < 1).all()),
        ),
    )


def lag_of(steps: np.ndarray) -> str:
    """Lags of seeds [seeds], and how many of them have one."""
    known = steps[np.isfinite(steps)]
    if not len(known):
        return "no early spike"
    return spread(known, ".0f") + ("" if len(known) == len(steps) else f" ({len(known)} of {len(steps)} seeds)")


def risen(times: np.ndarray) -> int:
    """The number of seeds in which the loss is that of a spike."""
    return int((times >= SPIKE).sum())


def _resolved(low: np.ndarray, high: np.ndarray) -> bool | None:
    """Whether no spike is left of one [seeds]: a smaller one, or none before, cannot tell."""
    if not risen(high):
        return None
    return True if not risen(low) else None if (low < high).any() else False


def _in_all(found: np.ndarray) -> bool | None:
    """Whether something is so in all seeds: some of them cannot tell."""
    return bool(found.all()) if len(found) and (found.all() or not found.any()) else None


def _in_time(lag: np.ndarray) -> np.ndarray:
    """Whether each lag is at most as long as is published: none is shorter than 1. That of no spike is not."""
    return lag <= PUBLISHED[1]
