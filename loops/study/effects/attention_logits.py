"""Attention logits that grow at high learning rates, with and without normalized queries and keys."""

from __future__ import annotations

import numpy as np

import scaler
from loops.study.effects.effect import Claim, Effect, Panel, Preset, curve, spread
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
    frequency_loss,
    sensitivity,
    text,
)

NAME = "attention-logits"
_PLAIN, _NORMALIZED = _WAYS = ("without", "with qk-layernorm")
_PUBLISHED_LOGIT = 1e4
_PUBLISHED_RATE = 0.3
_LARGEST_HALF = scaler.float_format("float16").max
_HIGH = 0.1


def run(seeds: int = 5, steps: int = 200) -> Effect:
    """Trains the small transformer at five learning rates, with and without qk-layernorm.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    courses = {}
    for way in _WAYS:
        made = SmallTransformer(way == _NORMALIZED, steps)
        courses[way] = [[made.run(rate, seed) for seed in range(seeds)] for rate in RATES]
    return effect_of(courses, frequency_loss(text()), seeds, steps)


def effect_of(courses: dict[str, list[list[Course]]], guess: float, seeds: int, steps: int) -> Effect:
    """The effect from its runs.

    Args:
        courses: For each way the runs [rates][seeds].
        guess: The held-out loss of one who knows how frequent each character is.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    ends = {way: field(rows, "end") for way, rows in courses.items()}
    by_block = {way: field(rows, "logit").max(axis=2) for way, rows in courses.items()}
    logits = {way: values.max(axis=2) for way, values in by_block.items()}
    late = slice(-max(1, steps // 10), None)
    entropy = {way: field(rows, "entropy")[:, :, late].mean(axis=(2, 3)) for way, rows in courses.items()}
    sensitive = {way: sensitivity(ends[way], field(rows, "first")[0]) for way, rows in courses.items()}
    lost = {way: ~(values < guess) for way, values in ends.items()}
    beyond = np.concatenate([lost[way][logits[way] > _PUBLISHED_LOGIT] for way in _WAYS])
    highest = {way: _highest(~values) for way, values in lost.items()}
    plain, normal = (logits[way] for way in _WAYS)
    high = RATES.index(_HIGH)
    return Effect(
        name=NAME,
        title="Attention logits at high learning rates",
        question="At a learning rate that is too high, attention logits grow until the attention is one-hot and the "
        "loss diverges. Does a network of two blocks show it, and does a normalization of queries and keys help?",
        published="[Wortsman et al. 2023](https://arxiv.org/abs/2309.14322), section 3.1.1 and figures 1, 2 and 9: "
        "small transformers at high learning rates diverge as large ones do. All points with an attention logit above "
        "10^4 diverged. LayerNorm of queries and keys (qk-layernorm) lowers the sensitivity to the learning rate, and "
        "trains 1.2B parameters at 0.3. Their smallest example has 2.4M parameters, and runs take 10^5 "
        "steps.",
        design=f"A transformer on text ({BLOCKS} blocks of width {WIDTH}, {CONTEXT} characters, batches of {BATCH}) "
        "trains in float32 (the paper: bfloat16), otherwise as in its section 2.1: Adam with beta2 0.95 and epsilon "
        "1e-8, gradients clipped to "
        f"norm 1, {100 * WARM:.0f} % of the steps of warm-up, then a cosine; z-loss of 1e-4; a weight decay of 1e-4 "
        "a step that does not depend on the rate. `scaler.observe.watch(kinds=['attention'])` "
        "gives the largest logit and the entropy of each block at each step. Shown are the largest of a run and the "
        "mean entropy of its last tenth. Diverged: the held-out loss in the end is that of one who knows how frequent "
        f"each character is ({guess:.2f} nats), or worse. Sensitivity: the paper's, the mean over the rates of "
        "min(loss, first loss) less the best loss, here over the upper five of its seven rates.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "of the runs with a logit above 10^4, those that diverge",
                "all",
                f"{int(beyond.sum())} of {len(beyond)}",
            ),
            (
                "sensitivity to the learning rate, without and with qk-layernorm, nats",
                "considerably lower with it",
                ", ".join(f"{way} {spread(values, '.2f')}" for way, values in sensitive.items()),
            ),
            (
                "highest rate at which no run diverges",
                f"{_PUBLISHED_RATE} with qk-layernorm (1.2B parameters)",
                ", ".join(f"{way} {rate}" for way, rate in highest.items()),
            ),
        ),
        columns=("learning rate", "", "largest logit", "entropy, nats", "held-out loss, nats", "diverged"),
        rows=tuple(
            (
                f"{rate:g}",
                way,
                spread(logits[way][at]),
                spread(entropy[way][at], ".2f"),
                spread(ends[way][at], ".2f"),
                f"{lost[way][at].sum()} of {seeds}",
            )
            for at, rate in enumerate(RATES)
            for way in _WAYS
        ),
        claims=(
            Claim(
                "without qk-layernorm the largest logit grows with the learning rate, at least tenfold "
                f"(from {spread(plain[0])} at {RATES[0]:g} to {spread(plain[-1])} at {RATES[-1]:g}).",
                bool((plain[-1] >= 10 * plain[0]).all()),
            ),
            Claim(
                f"runs with a logit above 10^4 diverge, and there are some ({int(beyond.sum())} of {len(beyond)}).",
                bool(len(beyond) and beyond.all()),
            ),
            Claim(
                f"without qk-layernorm the loss diverges at {RATES[-1]:g} in each seed.",
                bool(lost[_PLAIN][-1].all()),
            ),
            Claim(
                f"with it the largest logit at {RATES[-1]:g} is less than a tenth ({spread(normal[-1])}).",
                bool((normal[-1] < plain[-1] / 10).all()),
            ),
            Claim(
                f"with it no run at {_PUBLISHED_RATE} diverges.",
                not lost[_NORMALIZED][RATES.index(_PUBLISHED_RATE)].any(),
            ),
            Claim(
                f"from {_HIGH} on the loss is lower with it than without, in each seed.",
                bool((ends[_NORMALIZED][high:] < ends[_PLAIN][high:]).all()),
            ),
            Claim(
                "with it the loss is less sensitive to the learning rate, in each seed.",
                bool((sensitive[_NORMALIZED] < sensitive[_PLAIN]).all()),
            ),
            Claim(
                f"without it attention collapses: at {RATES[-1]:g} its entropy is less than half of that at "
                f"{RATES[0]:g} ({spread(entropy[_PLAIN][-1], '.2f')} and {spread(entropy[_PLAIN][0], '.2f')} nats).",
                bool((entropy[_PLAIN][-1] < entropy[_PLAIN][0] / 2).all()),
            ),
            Claim(
                "the first block has the largest logits: without qk-layernorm, on average over the seeds, at each "
                "rate from 0.01 on.",
                bool((by_block[_PLAIN].mean(axis=1)[RATES.index(1e-2) :].argmax(axis=1) == 0).all()),
            ),
        ),
        remarks=_remarks(plain, normal),
        panels=(
            Panel(
                "held-out loss in the end",
                "highest learning rate",
                "nats per character",
                tuple(curve(way, RATES, values) for way, values in ends.items()),
                log_x=10,
                reference=(guess, "frequencies alone"),
            ),
            Panel(
                "largest attention logit",
                "highest learning rate",
                "magnitude",
                tuple(curve(way, RATES, values) for way, values in logits.items()),
                log_x=10,
                log_y=10,
                reference=(_PUBLISHED_LOGIT, "published: above, all diverge"),
            ),
            Panel(
                "entropy of the attention in the end",
                "highest learning rate",
                "nats",
                tuple(curve(way, RATES, values) for way, values in entropy.items()),
                log_x=10,
            ),
        ),
        measured={
            f"{what} {way} {rate:g}": values[way][at].tolist()
            for what, values in (("logit", logits), ("loss", ends), ("entropy", entropy))
            for way in _WAYS
            for at, rate in enumerate(RATES)
        }
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()},
    )


def _remarks(plain: np.ndarray, normal: np.ndarray) -> str:
    """What the largest logits [rates, seeds] without and with qk-layernorm say beside the claims."""
    first = RATES.index(1e-2)
    power = np.polyfit(np.log(RATES[first:]), np.log(plain[first:]).mean(axis=1), 1)[0]
    beyond = [int((values > _LARGEST_HALF).sum()) for values in (plain, normal)]
    return (
        f"From {RATES[first]:g} on the largest logit grows as the power {power:.1f} of the learning rate. Each "
        "logit is a product of two vectors that grow with their weights, which is what the paper makes of it. Frequent "
        "characters are learned without any attention, along the path around it, so a loss above that of their "
        "frequencies alone takes more than attention that fails. The networks here have two blocks, use float32 and "
        "take few steps where the paper's take 10^5, so less goes wrong in them at the same logit.\n\nIn float16 they "
        f"would not get so far: {beyond[0]} of {plain.size} runs without qk-layernorm have a logit beyond "
        f"{_LARGEST_HALF:.0f}, the largest number of it, and {beyond[1]} of {normal.size} with it. Such a step "
        "is skipped at any loss scale, since the forward pass overflows. `scaler.observe.watch(kinds=['attention'])` "
        "shows the growth before."
    )


def _highest(trains: np.ndarray) -> str:
    """The highest rate at which all runs of [rates, seeds] train."""
    fine = np.flatnonzero(trains.all(axis=1))
    return f"{RATES[fine.max()]:g}" if len(fine) else "none"


PRESET = Preset(NAME, "attention logits that grow at high learning rates, with and without qk-layernorm", 200, run, 5)
