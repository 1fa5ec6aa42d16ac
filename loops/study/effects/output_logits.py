"""Output logits that drift away at high learning rates, with and without z-loss."""

from __future__ import annotations

import numpy as np

from loops.study.effects.effect import Claim, Effect, Panel, Preset, course_of, curve, spread
from loops.study.effects.small_transformer import (
    BATCH,
    BLOCKS,
    CONTEXT,
    RATES,
    WARM,
    WIDTH,
    Course,
    SmallTransformer,
    field,
    sensitivity,
)

NAME = "output-logits"
_NONE, _Z_LOSS, _DECAY = _WAYS = ("neither", "z-loss", "weight decay")
_COEFFICIENT = 1e-4
_DECAY_OF_RUN = 10.0
"""The paper's decay of 1e-4 in each of 1e5 steps, added up."""
_PUBLISHED_RATE = 0.1
_NEAR = 1.0
_FAR = 10.0


def run(seeds: int = 5, steps: int = 300) -> Effect:
    """Trains the small transformer with qk-layernorm at six rates: with z-loss, with weight decay, plainly.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    made = SmallTransformer(True, steps)
    settings = {_NONE: (0.0, 0.0), _Z_LOSS: (_COEFFICIENT, 0.0), _DECAY: (0.0, _DECAY_OF_RUN / steps)}
    courses = {
        way: [[made.run(rate, seed, z=z, decay=decay) for seed in range(seeds)] for rate in RATES]
        for way, (z, decay) in settings.items()
    }
    return effect_of(courses, seeds, steps)


def effect_of(courses: dict[str, list[list[Course]]], seeds: int, steps: int) -> Effect:
    """The effect from its runs.

    Args:
        courses: For each way the runs [rates][seeds].
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    tenth = max(1, steps // 10)
    drift = {way: field(rows, "log_z") for way, rows in courses.items()}
    late = {way: values[:, :, -tenth:].mean(axis=2) for way, values in drift.items()}
    halfway = drift[_NONE][:, :, steps // 2 : steps // 2 + tenth].mean(axis=2)
    ends = {way: field(rows, "end") for way, rows in courses.items()}
    cost = {way: field(rows, "rounded") - ends[way] for way, rows in courses.items()}
    sensitive = {way: sensitivity(ends[way], field(rows, "first")[0]) for way, rows in courses.items()}
    at = RATES.index(_PUBLISHED_RATE)
    farthest = {way: np.abs(values).max(axis=0) for way, values in late.items()}
    return Effect(
        name=NAME,
        title="Output logits at high learning rates, and z-loss",
        question="A cross-entropy does not see what is added to all logits alike. Do they drift away at high learning "
        "rates, and does a loss of 1e-4 log^2 Z hold them?",
        published="[Wortsman et al. 2023](https://arxiv.org/abs/2309.14322), section 3.1.2 and figures 3 and 4: at "
        "high rates, towards the end of training, output logits diverge and become very negative (shown for 2.4M "
        "parameters at a rate of 0.1). It occurs in models without weight decay regardless of scale. z-loss, "
        "1e-4 log^2 Z ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311)), resolves it; weight decay mitigates "
        "it in the larger models.",
        design=f"The transformer of [attention-logits](attention-logits.md) ({BLOCKS} blocks of width {WIDTH}, "
        f"{CONTEXT} characters, batches of {BATCH}) with qk-layernorm trains in float32 as in the paper's section 2.1: "
        "Adam with beta2 0.95 and epsilon 1e-8, gradients clipped to norm 1, "
        f"{100 * WARM:.0f} % of the steps of warm-up, then a cosine. It has z-loss, or a weight decay of "
        f"{_DECAY_OF_RUN / steps:.2g} a step that does not depend on the rate and adds up to the paper's over the run, "
        "or neither. log Z is the mean over a batch, here over the last tenth of the steps. Cost in bfloat16: by how "
        "much the held-out loss rises if the logits of the trained network are rounded to bfloat16. Sensitivity: the "
        "paper's, over the upper six of its seven rates.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"log Z at a rate of {_PUBLISHED_RATE} without z-loss and weight decay",
                "logits diverge, very negative",
                spread(late[_NONE][at], ".3g"),
            ),
            (
                "log Z with z-loss, the farthest of all rates",
                "resolved: close to 0",
                spread(farthest[_Z_LOSS], ".3g"),
            ),
            (
                "sensitivity to the learning rate, nats",
                "lower with z-loss",
                ", ".join(f"{way} {spread(values, '.2f')}" for way, values in sensitive.items()),
            ),
        ),
        columns=("learning rate", "", "log Z", "held-out loss, nats", "cost in bfloat16, nats"),
        rows=tuple(
            (
                f"{rate:g}",
                way,
                spread(late[way][row]),
                spread(ends[way][row], ".2f"),
                spread(cost[way][row], ".2g"),
            )
            for row, rate in enumerate(RATES)
            for way in _WAYS
        ),
        claims=(
            Claim(
                f"without z-loss and weight decay log Z leaves 0 at {_PUBLISHED_RATE}: it is beyond {_FAR:.0f} in size "
                f"in each seed ({spread(late[_NONE][at])}).",
                bool((np.abs(late[_NONE][at]) > _FAR).all()),
            ),
            Claim(
                f"the logits become negative: so is log Z at {_PUBLISHED_RATE} in each seed.",
                bool((late[_NONE][at] < 0).all()),
            ),
            Claim(
                "it gets worse with the learning rate: the mean size of log Z at the highest rate is ten times that at "
                "the lowest, or more.",
                bool(np.abs(late[_NONE][-1]).mean() >= 10 * np.abs(late[_NONE][0]).mean()),
            ),
            Claim(
                f"it happens towards the end: at {_PUBLISHED_RATE} the size of log Z in the last tenth is at least "
                "twice that halfway, on average.",
                bool(np.abs(late[_NONE][at]).mean() >= 2 * np.abs(halfway[at]).mean()),
            ),
            Claim(
                f"z-loss holds log Z: it is within {_NEAR:.0f} of 0 at each rate and in each seed.",
                bool((farthest[_Z_LOSS] <= _NEAR).all()),
            ),
            Claim(
                "with z-loss the loss is less sensitive to the learning rate, in each seed.",
                bool((sensitive[_Z_LOSS] < sensitive[_NONE]).all()),
            ),
            Claim(
                f"weight decay mitigates it: at {_PUBLISHED_RATE} log Z is at most half as large, on average.",
                bool(np.abs(late[_DECAY][at]).mean() <= np.abs(late[_NONE][at]).mean() / 2),
            ),
            Claim(
                "where logits have drifted bfloat16 costs more: at the highest rate more without z-loss than with it, "
                "in each seed.",
                bool((cost[_NONE][-1] > cost[_Z_LOSS][-1]).all()),
            ),
        ),
        remarks=_REMARKS,
        panels=(
            Panel(
                "log Z in the end",
                "highest learning rate",
                "log Z",
                tuple(curve(way, RATES, values) for way, values in late.items()),
                log_x=10,
                reference=(0.0, "published with z-loss: near 0"),
            ),
            Panel(
                f"log Z at a rate of {_PUBLISHED_RATE}",
                "step",
                "log Z",
                tuple(course_of(way, values[at].T) for way, values in drift.items()),
            ),
            Panel(
                "held-out loss in the end",
                "highest learning rate",
                "nats per character",
                tuple(curve(way, RATES, values) for way, values in ends.items()),
                log_x=10,
                log_y=10,
            ),
        ),
        measured={
            f"{what} {way} {rate:g}": values[way][row].tolist()
            for what, values in (("log Z", late), ("loss", ends), ("cost in bfloat16", cost))
            for way in _WAYS
            for row, rate in enumerate(RATES)
        }
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()},
    )


_REMARKS = "TODO"

PRESET = Preset(NAME, "output logits that drift away at high learning rates, with and without z-loss", 300, run, 5)
