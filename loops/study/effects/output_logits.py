"""Output logits that drift away at high learning rates, with and without z-loss."""

from __future__ import annotations

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
    early = runs.logit[:tenth, own[_NONE]].mean(axis=0)
    half = runs.log_z[records // 2 : records // 2 + tenth, own[_NONE]].mean(axis=0)
    ends = {way: runs.end[part] for way, part in own.items()}
    cost = {way: runs.rounded[part] - ends[way] for way, part in own.items()}
    sensitive = {way: sensitivity(ends[way], runs.first[part][0]) for way, part in own.items()}
    at = RATES.index(_PUBLISHED_RATE)
    plain = logit[_NONE]
    first = runs.log_z[0].mean()
    return Effect(
        name=NAME,
        title="Output logits at high learning rates, and z-loss",
        question="A cross-entropy does not see what is added to all logits alike. Do output logits drift away at high "
        "learning rates, and does a loss of 1e-4 log^2 Z hold them?",
        published="[Wortsman et al. 2023](https://arxiv.org/abs/2309.14322), section 3.1.2, figures 3 and 4: at high "
        "rates, towards the end of training, output logits diverge and become very negative (shown for 2.4M parameters "
        "at a rate of 0.1). It occurs in models without weight decay regardless of scale. z-loss, 1e-4 log^2 Z "
        "([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311)), resolves it. Weight decay mitigates it in the "
        "larger models.",
        design="The instability is one of many steps: the paper's runs take 10^5. So here are transformers of no "
        f"layers, which are fast: an embedding of width {WIDTH}, a LayerNorm and a head, without biases, predict the "
        f"next character of a text from one alone, in batches of {BATCH}. They train in float32 (the paper: "
        f"bfloat16), otherwise as in its section 2.1: "
        f"Adam with beta2 {_BETA_2} and epsilon 1e-8, gradients clipped to norm 1, {100 * WARM:.0f} % of "
        f"the steps of warm-up, then a cosine; with z-loss, or a weight decay of {_WEIGHT_DECAY:g} a step that does "
        "not depend on the rate, or neither. log Z and mean logits are means over a batch, in the table over the last "
        f"tenth of a run. log Z begins at {first:.1f}, the logarithm of the number of characters and a little. Cost in "
        "bfloat16: by how much the held-out loss rises if the trained network's logits are rounded to it. Sensitivity: "
        "the paper's, over four of its seven rates.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"mean output logit at a rate of {_PUBLISHED_RATE}, without z-loss and weight decay",
                "diverges, very negative",
                spread(plain[at], ".1f"),
            ),
            (
                f"log Z at a rate of {_PUBLISHED_RATE}: neither, z-loss",
                "diverges; close to 0",
                f"{spread(log_z[_NONE][at], '.1f')}; {spread(log_z[_Z_LOSS][at], '.1f')}",
            ),
            (
                "sensitivity to the learning rate, nats",
                "lower with z-loss",
                ", ".join(f"{way} {spread(values, '.3f')}" for way, values in sensitive.items()),
            ),
        ),
        columns=("learning rate", "", "mean logit", "log Z", "held-out loss, nats", "cost in bfloat16, nats"),
        rows=tuple(
            (
                f"{rate:g}",
                way,
                spread(logit[way][row], ".1f"),
                spread(log_z[way][row], ".1f"),
                spread(ends[way][row], ".3f"),
                spread(cost[way][row], ".1g"),
            )
            for row, rate in enumerate(RATES)
            for way in WAYS
        ),
        claims=(
            Claim(
                "without z-loss and weight decay output logits become negative: their mean falls during the run at "
                "each rate and in each seed.",
                bool((plain < early).all() and (plain < 0).all()),
            ),
            Claim(
                "more so at higher rates: the mean logit is lower at each rate than at the one before, on average.",
                bool((np.diff(plain.mean(axis=1)) < 0).all()),
            ),
            Claim(
                f"at {_PUBLISHED_RATE} all go together, so that log Z falls below 0, in each seed.",
                bool((log_z[_NONE][at] < 0).all()),
            ),
            Claim(
                f"it goes on towards the end: at {_PUBLISHED_RATE} log Z is lower in the last tenth than halfway, in "
                "each seed.",
                bool((log_z[_NONE][at] < half[at]).all()),
            ),
            Claim(
                f"z-loss holds log Z within {_NEAR:.0f} of 0 at {_PUBLISHED_RATE}, in each seed.",
                bool((np.abs(log_z[_Z_LOSS][at]) <= _NEAR).all()),
            ),
            Claim(
                "z-loss holds it nearer to 0 than neither does, on average, at each rate.",
                bool((np.abs(log_z[_Z_LOSS]).mean(axis=1) < np.abs(log_z[_NONE]).mean(axis=1)).all()),
            ),
            Claim(
                "weight decay mitigates it: at the highest rate log Z is at most half as far from 0, on average.",
                bool(np.abs(log_z[_DECAY][-1]).mean() <= np.abs(log_z[_NONE][-1]).mean() / 2),
            ),
            Claim(
                "the drift makes the loss more sensitive to the learning rate: less so with z-loss, in each seed.",
                bool((sensitive[_Z_LOSS] < sensitive[_NONE]).all()),
            ),
        ),
        remarks=_REMARKS,
        panels=(
            Panel(
                "log Z in the end",
                "highest learning rate",
                "log Z",
                tuple(curve(way, RATES, values) for way, values in log_z.items()),
                log_x=10,
                reference=(0.0, "published with z-loss: near 0"),
            ),
            Panel(
                f"log Z at {RATES[-1]:g}",
                "step",
                "log Z",
                tuple(_course(way, runs.log_z[:, own[way]][:, -1], steps) for way in WAYS),
            ),
            Panel(
                "mean logit in the end",
                "highest learning rate",
                "mean over characters",
                tuple(curve(way, RATES, values) for way, values in logit.items()),
                log_x=10,
            ),
        ),
        measured={
            f"{what} {way} {rate:g}": values[way][row].tolist()
            for what, values in (("log Z", log_z), ("logit", logit), ("loss", ends), ("cost in bfloat16", cost))
            for way in WAYS
            for row, rate in enumerate(RATES)
        }
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()},
    )


_REMARKS = (
    "Nothing in a cross-entropy holds the mean of the logits, since the same number may be added to all. Adam's "
    "steps are as long for a character that hardly ever follows as for others, and nearly always downwards, which "
    "may be what drives the mean; that was not taken apart here. The drift takes thousands of steps. The "
    "transformer of [attention-logits](attention-logits.md), with its few hundred, does not come so far, which is "
    "why this page has one without layers.\n\n"
    "z-loss pulls back by 2e-4 log Z, which is nothing at 0. So it stops the drift some way off, where it is as "
    "strong as what drives it, and the higher the rate the more it changes. In float32 the loss hardly notices: "
    "what is lost lies in the format. Logits of bfloat16 have 8 bits, so that the larger they all are, the coarser "
    "are their differences; the last column of the table has what rounding costs."
)


def _course(label: str, by_record: np.ndarray, steps: int) -> Line:
    """Records [records, seeds], each a mean with its neighbours, so that curves can be told apart."""
    parts = np.array_split(np.asarray(by_record), min(40, len(by_record)))
    means = np.array([part.mean(axis=0) for part in parts])
    return curve(label, (np.arange(len(means)) + 0.5) * steps / len(means), means)


PRESET = Preset(NAME, "output logits that drift away at high learning rates, with and without z-loss", 20_000, run, 5)
