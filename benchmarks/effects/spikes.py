"""Loss spikes of a second moment that is out of date: beta2, gradient clipping and StableAdamW; and Adam's epsilon."""

from __future__ import annotations

import numpy as np

from benchmarks.effects import networks
from benchmarks.effects.adam_copies import CLIP_NORM, CLIPPED, DECAY, PLAIN, STABLE, Curves, Setup, train
from benchmarks.effects.effect import Effect, Experiment, Line, Panel, curve, described, spread
from benchmarks.effects.loss_spike import AFTER, JUMP, SOON, SPIKE, Spike, last_of, spike_of
from benchmarks.effects.spike_claims import BETAS, EPSILONS, NARROW, NEAR, PUBLISHED, WIDE, claims_of, lag_of

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
    soon = norm[change : change + SOON]
    higher = spikes[worst, NARROW].end > spikes[worst, STABLE].end
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
            clip_norm=CLIP_NORM,
            near=NEAR,
            near_of_quiet=NEAR / quiet,
            soon=SOON,
            spike=SPIKE,
            jump=JUMP,
            all_steps=AFTER,
            plain=spikes[worst, PLAIN].times.mean(),
            first_norm=spread(soon[0], ".2f"),
            largest_norm=spread(soon.max(axis=0), ".1f"),
            higher=f"{higher.sum()} of {seeds}",
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"steps from the RMS to the spike (here halfway up to it), AdamW with beta2 {worst}",
                f"{PUBLISHED[0]} to {PUBLISHED[1]}",
                lag_of(spikes[worst, PLAIN].lag),
            ),
            (
                f"largest loss in {SOON} steps, times that before, with beta2 {worst}",
                "no number; StableAdamW avoids a spike",
                ", ".join(f"{way} {spread(spikes[worst, way].times, '.2f')}" for way in (PLAIN, STABLE)),
            ),
            (
                f"the same in {AFTER} steps",
                "no number",
                ", ".join(f"{way} {spread(spikes[worst, way].whole, '.2f')}" for way in WAYS),
            ),
            (
                "held-out loss in the end",
                "no number; StableAdamW outperforms clipping",
                ", ".join(f"{way} {spread(spikes[worst, way].end, '.3f')}" for way in (WIDE, STABLE)),
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


def _around(label: str, by_step: np.ndarray, change: int) -> Line:
    first, last = max(change - _BEFORE, 0), min(change + AFTER, len(by_step))
    return curve(label, np.arange(first, last) - change, by_step[first:last])


EXPERIMENT = Experiment(NAME, "loss spikes by beta2, gradient clipping, StableAdamW, and epsilon", 600, run, 5)
