"""Output logits that drift away at high learning rates, with and without z-loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loops.study.effects.adam_copies import CLIPPED, Setup
from loops.study.effects.effect import Claim, Effect, Line, Panel, Preset, curve, spread
from loops.study.effects.small_transformer import WARM, sensitivity
from loops.study.effects.zero_layers import BATCH, WIDTH, Runs, train

NAME = "output-logits"
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
_NONE, _Z_LOSS, _DECAY = WAYS = ("neither", "z-loss", "weight decay")
_COEFFICIENT, _WEIGHT_DECAY = 1e-4, 1e-4
_BETA_2 = 0.95
_PUBLISHED_RATE = 0.1
_NEAR = 1.0
_POINTS = 40
"""The points of a curve over steps."""


def run(seeds: int = 5, steps: int = 20_000) -> Effect:
    """Trains transformers of no layers at four learning rates: with z-loss, with weight decay, and with neither.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    settings = {_NONE: (0.0, 0.0), _Z_LOSS: (_COEFFICIENT, 0.0), _DECAY: (0.0, _WEIGHT_DECAY)}
    setups = [Setup(rate, _BETA_2, way=CLIPPED, decay=settings[way][1] / rate) for way in WAYS for rate in RATES]
    coefficients = [settings[way][0] for way in WAYS for _ in RATES]
    return effect_of(train(setups, coefficients, seeds=seeds, steps=steps), seeds, steps)


def effect_of(runs: Runs, seeds: int, steps: int) -> Effect:
    """The effect from its runs: for each of `WAYS` each of `RATES`.

    Args:
        runs: The runs.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    own = {way: slice(number * len(RATES), (number + 1) * len(RATES)) for number, way in enumerate(WAYS)}
    records = len(runs.log_z)
    tenth = max(1, records // 10)
    log_z = {way: runs.log_z[-tenth:, part].mean(axis=0) for way, part in own.items()}
    logit = {way: runs.logit[-tenth:, part].mean(axis=0) for way, part in own.items()}
    probability = np.array([(logit[way] - log_z[way]).mean(axis=1) for way in WAYS])
    ends = {way: runs.end[part] for way, part in own.items()}
    cost = {way: runs.rounded[part] - ends[way] for way, part in own.items()}
    sensitive = {way: sensitivity(ends[way], runs.first[part][0]) for way, part in own.items()}
    at = RATES.index(_PUBLISHED_RATE)
    plain, held = log_z[_NONE], log_z[_Z_LOSS]
    at_rate = {way: runs.log_z[:, part][:, at] for way, part in own.items()}
    decayed = (np.abs(log_z[_DECAY]) < np.abs(plain)).sum(axis=1)
    nearer = ", ".join(f"in {decayed[row]} of {seeds} seeds at {RATES[row]:g}" for row in range(at, len(RATES)))
    crossing = _crossing(at_rate[_NONE], steps)
    return Effect(
        name=NAME,
        title="Output logits at high learning rates, and z-loss",
        question="A cross-entropy does not see what is added to all logits alike. Do output logits drift away at high "
        "learning rates, and does a loss of 1e-4 log^2 Z hold them?",
        published="[Wortsman et al. 2023](https://arxiv.org/abs/2309.14322), section 3.1.2, figures 3 and 4: at high "
        "rates, towards the end of training, output logits diverge and become very negative (shown for 2.4M parameters "
        "at a rate of 0.1). It occurs in models without weight decay regardless of scale. z-loss, 1e-4 log^2 Z "
        "([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311)), is to keep log Z close to 0, and resolves it. "
        "Weight decay mitigates it in the larger models.",
        design="The instability is one of many steps: the paper's runs take 10^5. So here are transformers of no "
        f"layers, which are fast: an embedding of width {WIDTH}, a LayerNorm and a head, without biases, predict the "
        f"next character of a text from one alone, in batches of {BATCH}. They train in float32 (the paper: "
        f"bfloat16), otherwise as in its section 2.1: "
        f"Adam with beta2 {_BETA_2} and epsilon 1e-8, gradients clipped to norm 1, {100 * WARM:.0f} % of "
        f"the steps of warm-up, then a cosine; with z-loss, or a weight decay of {_WEIGHT_DECAY:g} a step that does "
        "not depend on the rate, or neither. log Z is a mean over a batch, in the table over the last tenth of a run. "
        f"It begins at {runs.log_z[0].mean():.1f}, the logarithm of the number of characters and a little. The mean "
        "logit is log Z and the mean logarithm of a probability, and the latter is between "
        f"{probability.min():.1f} and {probability.max():.1f} for each rate and way. So log Z alone says how far "
        "logits drift. Cost in bfloat16: by how much the held-out loss rises if the trained network's logits are "
        "rounded to it. Sensitivity: the paper's, over four of its seven rates. Each point of the middle panel is a "
        f"mean over {steps / min(_POINTS, records):.0f} steps.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"mean output logit at a rate of {_PUBLISHED_RATE}, without z-loss and weight decay",
                "diverges, very negative",
                f"{spread(logit[_NONE][at], '.1f')}, of which log Z is {spread(plain[at], '.1f')}",
            ),
            (
                f"log Z at a rate of {_PUBLISHED_RATE} with z-loss",
                "close to 0",
                spread(held[at], ".1f"),
            ),
            (
                "sensitivity to the learning rate, nats",
                "lower with z-loss",
                ", ".join(f"{way} {spread(values, '.3f')}" for way, values in sensitive.items()),
            ),
        ),
        columns=("learning rate", "", "log Z", "held-out loss, nats", "cost in bfloat16, nats"),
        rows=tuple(
            (
                f"{rate:g}",
                way,
                spread(log_z[way][row], ".1f"),
                spread(ends[way][row], ".3f"),
                spread(cost[way][row], ".1g"),
            )
            for row, rate in enumerate(RATES)
            for way in WAYS
        ),
        claims=(
            Claim(
                "without z-loss and weight decay output logits drift down, and more so at higher rates: log Z is lower "
                "at each rate than at the one before, on average.",
                bool((np.diff(plain.mean(axis=1)) < 0).all()),
            ),
            Claim(
                f"at {_PUBLISHED_RATE} they become negative together: log Z is below 0 in the end, in each seed.",
                bool((plain[at] < 0).all()),
            ),
            Claim(
                f"they do so towards the end of training: at {_PUBLISHED_RATE} log Z comes to 0 in the second half of "
                f"the run (which is our bound), in each seed ({_steps(crossing)}).",
                bool((np.isfinite(crossing) & (crossing > steps / 2)).all()),
            ),
            Claim(
                f"z-loss holds log Z close to 0: within {_NEAR:.0f} (which is our bound) at {_PUBLISHED_RATE}, in each "
                "seed.",
                bool((np.abs(held[at]) <= _NEAR).all()),
            ),
            Claim(
                f"from {_PUBLISHED_RATE} on log Z is nearer to 0 with z-loss than without either, in each seed.",
                bool((np.abs(held[at:]) < np.abs(plain[at:])).all()),
            ),
            Claim(
                f"weight decay mitigates it (published for larger models): from {_PUBLISHED_RATE} on log Z is nearer "
                f"to 0 with it than without either, on average ({nearer}).",
                bool((np.abs(log_z[_DECAY][at:]).mean(axis=1) < np.abs(plain[at:]).mean(axis=1)).all()),
            ),
            Claim(
                "the drift makes the loss more sensitive to the learning rate: less so with z-loss, in each seed.",
                bool((sensitive[_Z_LOSS] < sensitive[_NONE]).all()),
            ),
        ),
        remarks=_remarks(plain, held, ends, cost, runs.log_z[:, own[_Z_LOSS]][:, -1].mean(axis=1), steps),
        panels=(
            Panel(
                "log Z in the end",
                "highest learning rate",
                "log Z",
                tuple(curve(way, RATES, values) for way, values in log_z.items()),
                log_x=10,
                reference=(0.0, "published with z-loss: close to 0"),
            ),
            Panel(
                f"log Z at {_PUBLISHED_RATE}",
                "step",
                "log Z",
                tuple(_course(way, values, steps) for way, values in at_rate.items()),
            ),
            Panel(
                "held-out loss in the end",
                "highest learning rate",
                "nats per character",
                tuple(curve(way, RATES, values) for way, values in ends.items()),
                log_x=10,
            ),
        ),
        measured={
            f"{what} {way} {rate:g}": values[way][row].tolist()
            for what, values in (("log Z", log_z), ("logit", logit), ("loss", ends), ("cost in bfloat16", cost))
            for way in WAYS
            for row, rate in enumerate(RATES)
        }
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()}
        | {f"step at which log Z comes to 0 at {_PUBLISHED_RATE}": crossing.tolist()},
    )


def _crossing(log_z: np.ndarray, steps: int) -> np.ndarray:
    """The step of the first record [records, seeds] in which log Z is not above 0, NaN if there is none, [seeds]."""
    below = log_z <= 0
    first = (below.argmax(axis=0) + 1.0) * steps / len(log_z)
    return np.where(below.any(axis=0), first, np.nan)


def _steps(crossing: np.ndarray) -> str:
    known = crossing[np.isfinite(crossing)]
    if not len(known):
        return "in none"
    return f"step {spread(known, '.0f')}" + ("" if len(known) == len(crossing) else f" in {len(known)} seeds")


def _remarks(
    plain: np.ndarray,
    held: np.ndarray,
    ends: Mapping[str, np.ndarray],
    cost: Mapping[str, np.ndarray],
    course: np.ndarray,
    steps: int,
) -> str:
    """What is said beside the claims.

    Args:
        plain: log Z in the end without z-loss and weight decay, [rates, seeds].
        held: The same with z-loss.
        ends: The held-out losses of each way, likewise.
        cost: What rounding to bfloat16 adds to them, likewise.
        course: log Z of each record at the highest rate with z-loss, a mean over the seeds.
        steps: The steps of each run.
    """
    overlap = [
        f"{rate:g}"
        for rate, one, other in zip(RATES, plain, held, strict=True)
        if max(one.min(), other.min()) <= min(one.max(), other.max())
    ]
    rises = [ends[way][-1].mean() - ends[way][0].mean() for way in (_NONE, _Z_LOSS)]
    lowest = (int(course.argmin()) + 1) * steps / len(course)
    return (
        "Nothing in a cross-entropy holds the mean of the logits, since the same number may be added to all. Adam's "
        "steps are as long for a character that hardly ever follows as for others, and nearly always downwards, which "
        "may be what drives the mean; that was not taken apart here. The drift takes thousands of steps. The "
        "transformer of [attention-logits](attention-logits.md), with its few hundred, does not come so far, which is "
        "why this page has one without layers. Here the drift begins with the run; in the paper the divergence occurs "
        "towards the end.\n\n"
        "z-loss pulls back by 2e-4 log Z, which is nothing at 0, and log Z stops some way off. What stops it there was "
        "not tested: Adam divides the pull, too, by the root of past squared gradients. With z-loss "
        f"at {RATES[-1]:g} log Z is lowest at about step {lowest:.0f} ({course.min():.1f}), and {course[-1]:.1f} in "
        "the end. "
        + (f"At {' and '.join(overlap)} the ranges with z-loss and without overlap. " if overlap else "")
        + f"From {RATES[0]:g} to {RATES[-1]:g} the loss rises by {rises[0]:.3f} nats without z-loss and by "
        f"{rises[1]:.3f} with it, so the drift is not what costs. Logits of bfloat16 have 8 significant bits, so that "
        "the larger they all are, the coarser are their differences. The last column of the table has what that "
        f"costs: {max(values.mean(axis=1).max() for values in cost.values()):.1g} nats at most, on average."
    )


def _course(label: str, by_record: np.ndarray, steps: int) -> Line:
    """Records [records, seeds], each a mean with its neighbours, so that curves can be told apart."""
    parts = np.array_split(np.asarray(by_record), min(_POINTS, len(by_record)))
    means = np.array([part.mean(axis=0) for part in parts])
    return curve(label, (np.arange(len(means)) + 0.5) * steps / len(means), means)


PRESET = Preset(NAME, "output logits that drift away at high learning rates, with and without z-loss", 20_000, run, 5)
