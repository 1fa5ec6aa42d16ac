"""What is claimed of loss spikes after gradients have grown, and of epsilon."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loops.study.effects.adam_copies import CLIP_NORM, PLAIN, STABLE
from loops.study.effects.effect import Claim, spread
from loops.study.effects.loss_spike import AFTER, JUMP, SOON, SPIKE, Spike

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
    lag, seeds = plain[worst].lag, len(plain[worst].lag)
    followed = plain[middle].lag[np.isfinite(plain[middle].lag)]
    low, high = plain[middle].times, plain[worst].times
    lower = stable.end < wide.end
    return (
        Claim(
            "the change does what it should: AdamW's mean RMS over the last "
            f"{settled} steps before it is {SETTLED} or less (our bound), and the largest "
            f"after it {JUMP:.0f} or more, for each beta2 and in each seed.",
            all(((seen.before <= SETTLED) & (seen.jump >= JUMP)).all() for seen in plain.values()),
            published=False,
        ),
        Claim(
            f"with beta2 {worst} AdamW's loss spikes in each seed ({spread(high, '.2f')} times).",
            bool((high >= SPIKE).all()),
        ),
        Claim(
            f"with beta2 {worst} the loss is halfway up to its spike at most {PUBLISHED[1]} steps after the RMS, in "
            f"each seed ({lag_of(lag)}).",
            bool(_in_time(lag).all()),
        ),
        Claim(
            f"the same with beta2 {middle}, in each seed with a spike ({lag_of(plain[middle].lag)}; in "
            f"{_in_time(followed).sum()} of {len(followed)}).",
            bool(_in_time(followed).all()) if len(followed) else None,
        ),
        Claim(
            f"a smaller beta2 makes the spike smaller, in each seed: {spread(low, '.2f')} times at {middle}, "
            f"{spread(high, '.2f')} at {worst}. It does not resolve it here: at {middle} it is {SPIKE} or more in "
            f"{risen(low)} of {seeds} seeds ({BETAS[0]} does not count: at a beta2 of beta1 no weight's update is "
            "larger than the learning rate).",
            bool((low < high).all()),
        ),
        Claim(
            f"StableAdamW avoids a spike: with beta2 {worst} its loss stays below {SPIKE} times in the {AFTER} steps "
            f"after the change, in each seed (in the first {SOON} steps {spread(stable.times, '.2f')} times, {SPIKE} "
            f"or more in {risen(stable.times)} of {seeds} seeds, with AdamW in {risen(high)}; in the next "
            f"{AFTER - SOON} {spread(stable.later, '.2f')} times, {SPIKE} or more in {risen(stable.later)}, with "
            f"AdamW in {risen(plain[worst].later)}).",
            bool((stable.whole < SPIKE).all()),
        ),
        Claim(
            f"with beta2 {worst} StableAdamW's loss rises less than with gradients clipped to {CLIP_NORM:g} in the "
            f"{SOON} steps after the change, in each seed.",
            bool((stable.times < wide.times).all()),
            published=False,
        ),
        Claim(
            f"in all {AFTER} steps, too, its largest loss is lower than with gradients clipped to {CLIP_NORM:g}, "
            f"in each seed (it is in {(stable.whole < wide.whole).sum()} of {seeds}).",
            bool((stable.whole < wide.whole).all()),
            published=False,
        ),
        Claim(
            f"with beta2 {worst} StableAdamW ends with a lower loss than with gradients clipped to {CLIP_NORM:g} "
            f"({spread(stable.end, '.2f')} and {spread(wide.end, '.2f')}; lower in {lower.sum()} of {seeds} "
            "seeds).",
            bool(lower.all()) if lower.all() or not lower.any() else None,
        ),
        Claim(
            f"with beta2 {worst} and gradients clipped to {NEAR:g} the loss rises less than with StableAdamW over "
            f"the {AFTER} steps, in each seed ({spread(narrow.whole, '.2f')} and {spread(stable.whole, '.2f')} times).",
            bool((narrow.whole < stable.whole).all()),
            published=False,
        ),
        Claim(
            "where epsilon is the gradient's root mean square or more, updates are smaller than with "
            f"{EPSILONS[0]:.0e}, in each seed.",
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


def _in_time(lag: np.ndarray) -> np.ndarray:
    """Whether each lag is at most as long as is published: none is shorter than 1. That of no spike is not."""
    return lag <= PUBLISHED[1]
