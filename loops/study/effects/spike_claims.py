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
"""A limit on gradients near their norm before the change."""
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
            f"with beta2 {worst} AdamW's loss spikes in each seed ({spread(plain[worst].times, '.1f')} times).",
            bool((plain[worst].times >= SPIKE).all()),
        ),
        Claim(
            f"with beta2 {worst} the loss is halfway up to its spike {PUBLISHED[0]} to {PUBLISHED[1]} steps "
            f"after the RMS, in each seed ({lag_of(lag)}).",
            bool(_in_time(lag).all()),
        ),
        Claim(
            f"the same with beta2 {middle}, in each seed with a spike ({lag_of(plain[middle].lag)}; in "
            f"{_in_time(followed).sum()} of {len(followed)}).",
            bool(_in_time(followed).all()) if len(followed) else None,
        ),
        Claim(
            "a smaller beta2 makes the spike smaller, on average: "
            + ", ".join(f"{spread(plain[beta].times, '.1f')} times at {beta}" for beta in BETAS)
            + ".",
            bool(np.all(np.diff([plain[beta].times.mean() for beta in BETAS]) > 0)),
        ),
        Claim(
            f"StableAdamW avoids the spike that follows the change: there is none in the next {SOON} steps, in "
            "each seed and for each beta2.",
            all((spikes[beta, STABLE].times < SPIKE).all() for beta in BETAS),
        ),
        Claim(
            f"nor is there one later: with beta2 {worst} StableAdamW's loss stays below {SPIKE} times in the next "
            f"{AFTER - SOON} steps, in each seed ({spread(stable.later, '.1f')} times; {SPIKE} or more in "
            f"{_risen(stable)} of {seeds} seeds, with AdamW in {_risen(plain[worst])}, with a limit of {NEAR:g} in "
            f"{_risen(narrow)}, with AdamW and beta2 {BETAS[0]} in {_risen(plain[BETAS[0]])}).",
            bool((stable.later < SPIKE).all()),
            published=False,
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
            f"a limit on gradients near their norm avoids that spike, too: with beta2 {worst} and a limit "
            f"of {NEAR:g} there is none in the {SOON} steps, in each seed ({spread(narrow.times, '.1f')} times).",
            bool((narrow.times < SPIKE).all()),
            published=False,
        ),
        Claim(
            f"that limit is better than StableAdamW in all {AFTER} steps: with it the largest loss is lower, "
            f"in each seed ({spread(narrow.whole, '.1f')} and {spread(stable.whole, '.1f')} times).",
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


def _risen(seen: Spike) -> int:
    """The number of seeds in which the loss is that of a spike later."""
    return int((seen.later >= SPIKE).sum())


def _in_time(lag: np.ndarray) -> np.ndarray:
    """Whether each lag is as long as is published. That of no spike is not."""
    return (PUBLISHED[0] <= lag) & (lag <= PUBLISHED[1])
