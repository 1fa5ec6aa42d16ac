"""Loss spikes of a second moment that is out of date: beta2, gradient clipping and StableAdamW; and Adam's epsilon."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.effects import networks
from benchmarks.effects.adam_copies import CLIP_NORM, CLIPPED, DECAY, PLAIN, STABLE, Curves, Setup, train
from benchmarks.effects.effect import Effect, Experiment, Line, Panel, curve, described, spread
from benchmarks.effects.loss_spike import AFTER, JUMP, SOON, SPIKE, Spike, last_of, spike_of
from benchmarks.effects.spike_claims import BETAS, EPSILONS, NARROW, NEAR, PUBLISHED, WIDE, claims_of, lag_of, risen

NAME = "spikes"
_SETTINGS = {PLAIN: (PLAIN, CLIP_NORM), WIDE: (CLIPPED, CLIP_NORM), NARROW: (CLIPPED, NEAR), STABLE: (STABLE, 1.0)}
WAYS = tuple(_SETTINGS)
_RATE = 3e-3
_QUIET = 0.01
_CALM = 2 / 3
"""The share of a run in which the loss is multiplied by `_QUIET`."""
_BEFORE = 5
"""The steps before the change that are drawn."""


def run(seeds: int = 5, steps: int = 600) -> Effect:
    """Trains with a loss that becomes a hundred times larger, and with epsilons that do not.

    Args:
        seeds: The number of networks for each optimizer.
        steps: The steps of each run.
    """
    change = int(_CALM * steps)
    changed = train(
        [Setup(_RATE, beta, way=way, limit=limit) for beta in BETAS for way, limit in _SETTINGS.values()],
        seeds=seeds,
        factors=[_QUIET] * change + [1.0] * (steps - change),
    )
    level = train([Setup(_RATE, 0.99, epsilon) for epsilon in EPSILONS], seeds=seeds, factors=[_QUIET] * steps)
    return effect_of(changed, level, change, seeds, steps)


def effect_of(changed: Curves, level: Curves, change: int, seeds: int, steps: int) -> Effect:
    """The effect from its runs.

    Args:
        changed: The runs with a change: for each of `BETAS` each of `WAYS`.
        level: The runs without: for each of `EPSILONS`.
        change: The first step with the larger loss.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    cases = [(beta, way) for beta in BETAS for way in WAYS]
    spikes = {case: spike_of(changed, number, change) for number, case in enumerate(cases)}
    late = slice(-max(1, steps // 10), None)
    grad, update = (np.asarray(values[late], np.float64).mean(axis=0) for values in (level.grad, level.update))
    share = update / update[0]
    worst = BETAS[-1]
    norm = np.asarray(changed.norm[:, cases.index((worst, PLAIN))], np.float64)
    quiet = norm[last_of(change)].mean()
    kept = worst * (1 - worst**change) / (1 - worst ** (change + 1))
    single = max(changed.rms[last_of(change), cases.index((beta, PLAIN))].max() for beta in BETAS)
    above = [number for number, epsilon in enumerate(EPSILONS) if epsilon >= grad[number].max()]
    return Effect(
        **described(
            NAME,
            sizes=", ".join(map(str, networks.SIZES)),
            batch=networks.BATCH,
            rate=_RATE,
            decay=DECAY,
            quiet=_QUIET,
            change=change,
            worst=worst,
            kept=kept,
            clip_norm=CLIP_NORM,
            near=NEAR,
            near_of_quiet=NEAR / quiet,
            lasts=change - last_of(change).start,
            soon=SOON,
            spike=SPIKE,
            after=AFTER - SOON,
            jump=JUMP,
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"steps from the RMS to the spike (here halfway up to it), AdamW with beta2 {worst}",
                f"{PUBLISHED[0]} to {PUBLISHED[1]}",
                lag_of(spikes[worst, PLAIN].lag),
            ),
            *(
                (
                    f"largest loss in {many} steps, times that before, with beta2 {worst}",
                    published,
                    ", ".join(f"{way} {spread(getattr(spikes[worst, way], what), '.2f')}" for way in WAYS),
                )
                for many, what, published in (
                    (SOON, "times", "no number; StableAdamW avoids a spike"),
                    (AFTER, "whole", "no number"),
                )
            ),
            (
                f"held-out loss in the end, with beta2 {worst}",
                "no number; StableAdamW outperforms clipping",
                ", ".join(f"{way} {spread(spikes[worst, way].end, '.3f')}" for way in WAYS),
            ),
            (
                "update where epsilon is the gradient's root mean square or more, over that with epsilon 1e-8",
                "decreases",
                ", ".join(f"{spread(share[number], '.2g')} at {EPSILONS[number]:.0e}" for number in above),
            ),
        ),
        columns=(
            "beta2",
            "",
            "RMS before",
            "largest RMS after",
            f"spike ({SOON} steps), times",
            f"later (next {AFTER - SOON}), times",
            "lag, steps",
            "held-out loss in the end",
        ),
        rows=tuple(
            (
                f"{beta}",
                way,
                spread(seen.before, ".2f"),
                spread(seen.jump, ".1f"),
                spread(seen.times, ".2f"),
                spread(seen.later, ".2f"),
                lag_of(seen.lag),
                spread(seen.end, ".3f"),
            )
            for (beta, way), seen in spikes.items()
        ),
        claims=claims_of(spikes, share[above], change - last_of(change).start),
        remarks=_remarks(norm[change : change + SOON], spikes, worst, float(single)),
        panels=(
            *(
                Panel(
                    f"{what}, beta2 {worst}",
                    "steps after the change",
                    unit,
                    tuple(_around(way, values[:, cases.index((worst, way))], change) for way in WAYS),
                    bounds=((0.0, f"left: loss times {_QUIET}"),),
                )
                for what, unit, values in (
                    ("held-out loss", "nats", changed.loss),
                    ("RMS", "root mean of g^2 / u", changed.rms),
                )
            ),
            Panel(
                f"spike in {SOON} steps",
                "beta2",
                "times the loss before",
                tuple(
                    curve(way, range(len(BETAS)), np.array([spikes[beta, way].times for beta in BETAS])) for way in WAYS
                ),
                reference=(SPIKE, "one, by our bound"),
                ticks=tuple(f"{beta}" for beta in BETAS),
            ),
            Panel(
                "epsilon",
                "epsilon",
                "root mean square",
                (curve("update", EPSILONS, update), curve("gradient", EPSILONS, grad)),
                log_x=10,
                log_y=10,
            ),
        ),
        measured={
            f"{what} {way} beta2 {beta}": getattr(seen, what).tolist()
            for (beta, way), seen in spikes.items()
            for what in Spike._fields
        }
        | {f"update epsilon {epsilon:.0e}": update[number].tolist() for number, epsilon in enumerate(EPSILONS)}
        | {f"gradient epsilon {epsilon:.0e}": grad[number].tolist() for number, epsilon in enumerate(EPSILONS)},
    )


def _remarks(norm: np.ndarray, spikes: Mapping[tuple[float, str], Spike], worst: float, single: float) -> str:
    """What is said beside the claims.

    Args:
        norm: AdamW's gradient norms soon after the change, [steps, seeds].
        spikes: What the change did, by beta2 and way.
        worst: The largest beta2.
        single: AdamW's largest RMS of one step before the change.
    """
    near, stable = (spikes[worst, way] for way in (NARROW, STABLE))
    before = ", ".join(f"{spikes[beta, PLAIN].before.mean():.2f} with {beta}" for beta in BETAS)
    return (
        "The change is made on purpose and is as sudden as can be, so that what is seen is the second moment's delay "
        "beyond the first's: the gradient is a hundred times larger, and its mean square remembers. A large beta2 "
        "forgets slowly, takes too long steps for as long as that lasts, and the loss spikes. The RMS rises with the "
        "change, by construction, so that it predicts nothing here. In a real run layers begin to learn, and data "
        "changes. What comes close to the change in practice is a loss scale that changes and is not divided "
        "out, or a loss of which a part is switched on late.\n\n"
        "A limit on gradients asks how large they are, and the one on updates how large they are for their moment. A "
        f"limit of {CLIP_NORM:g} comes late: the first of AdamW's gradients after the change has a norm of "
        f"{spread(norm[0], '.2f')} with beta2 {worst} and no limit, and the largest "
        f"{spread(norm.max(axis=0), '.1f')}, once the loss has risen. A limit of {NEAR:g} holds the loss at "
        f"{spread(near.whole, '.2f')} times over the {AFTER} steps, {SPIKE} or more in {risen(near.whole)} of "
        f"{len(near.whole)} seeds, where StableAdamW comes to "
        f"{spread(stable.whole, '.2f')}. The change multiplies all gradients by one factor, which a global limit near "
        f"the old norm undoes, and somebody has to know that limit. In the end its loss is {spread(near.end, '.3f')}, "
        f"that of StableAdamW {spread(stable.end, '.3f')}; higher in {(near.end > stable.end).sum()} of "
        f"{len(near.end)} seeds. What rises later under StableAdamW is not explained here. The RMS is known at "
        "each step. `scaler.observe.watch(kinds=['update_rms'])` measures the updates themselves, and "
        "`scaler.SpikeGuard` skips or clips gradients by their own last norms.\n\n"
        f"Before the change AdamW's mean RMS is {before}, by beta2; in one step it is up to {single:.1f}. The last "
        "panel has no transition at one epsilon. A single gradient g is shortened to 1 / (1 + epsilon / g), which "
        "falls from 0.9 to 0.1 over two decades, and a tensor's gradients differ by orders of magnitude."
    )


def _around(label: str, by_step: np.ndarray, change: int) -> Line:
    first, last = max(change - _BEFORE, 0), min(change + AFTER, len(by_step))
    return curve(label, np.arange(first, last) - change, by_step[first:last])


EXPERIMENT = Experiment(NAME, "loss spikes by beta2, gradient clipping, StableAdamW, and epsilon", 600, run, 5)
