"""Attention logits that grow at high learning rates, with and without normalized queries and keys."""

from __future__ import annotations

import dataclasses

import numpy as np

import scaler
from benchmarks.effects.adam_copies import CLIPPED, Setup
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, spread
from benchmarks.effects.small_transformer import (
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
    held_out,
    sensitivity,
    text,
)
from benchmarks.effects.zero_layers import BATCH as CHARACTERS
from benchmarks.effects.zero_layers import pairs_of, train

NAME = "attention-logits"
_PLAIN, _NORMALIZED = _WAYS = ("without", "with qk-layernorm")
_PUBLISHED_LOGIT, _DETERIORATES = 1e4, 1e3
_BIGRAM = Setup(1e-2, 0.95, way=CLIPPED, decay=1e-2)
"""How the model without blocks is trained: as the others, at a decay of 1e-4 a step; so is its z-loss."""
_LONGER = 100
"""How many times as many steps it takes, each of which sees a sixteenth as many characters."""
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
    task = text()
    given, following = (each.numpy() for each in held_out(task))
    guess = frequency_loss(dataclasses.replace(task, test_characters=following.ravel()))
    alone = train([_BIGRAM], [1e-4], seeds=seeds, steps=_LONGER * steps, held_out=pairs_of(given, following))
    return effect_of(courses, guess, alone.end[0], seeds, steps)


def effect_of(
    courses: dict[str, list[list[Course]]], guess: float, alone: np.ndarray, seeds: int, steps: int
) -> Effect:
    """The effect from its runs.

    Args:
        courses: For each way the runs [rates][seeds].
        guess: The held-out loss of one who knows how frequent each character is.
        alone: The held-out losses of models without blocks, [seeds].
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    ends = {way: field(rows, "end") for way, rows in courses.items()}
    by_block = {way: field(rows, "logit").max(axis=2) for way, rows in courses.items()}
    logits = {way: values.max(axis=2) for way, values in by_block.items()}
    late = slice(-max(1, steps // 10), None)
    entropy = {way: field(rows, "entropy")[:, :, late].mean(axis=(2, 3)) for way, rows in courses.items()}
    sensitive = {way: sensitivity(ends[way], field(rows, "first")[0]) for way, rows in courses.items()}
    bigram = float(alone.mean())
    worse = {way: ~(values <= bigram) for way, values in ends.items()}
    lost = {way: ~(values < guess) for way, values in ends.items()}
    plain, normal = (logits[way] for way in _WAYS)
    beyond, large = plain > _PUBLISHED_LOGIT, plain > _DETERIORATES
    far, near = ends[_PLAIN][large], ends[_PLAIN][~large]
    above = f"{worse[_PLAIN][beyond].sum()} of {beyond.sum()}"
    below = f"{worse[_PLAIN][~beyond].sum()} of {(~beyond).sum()}"
    high, rates = RATES.index(_HIGH), large.any(axis=1)
    deteriorates = bool(large.any() and not large.all() and near.max() < far.min())
    # Neither where the loss begins to deteriorate nor that it is the logits' fault follows from such runs.
    not_apart = deteriorates and bool((ends[_NORMALIZED][rates].mean(axis=1) > near.max()).all())
    return Effect(
        **described(
            NAME,
            blocks=BLOCKS,
            width=WIDTH,
            context=CONTEXT,
            batch=BATCH,
            warm_percent=100 * WARM,
            longer_steps=_LONGER * steps,
            characters=CHARACTERS,
            rate=_BIGRAM.rate,
            epochs=_LONGER * CHARACTERS / (BATCH * CONTEXT),
            alone=spread(alone, ".3f"),
            guess=guess,
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "sensitivity to the learning rate, without and with qk-layernorm, nats",
                "considerably lower with it",
                ", ".join(f"{way} {spread(values, '.2f')}" for way, values in sensitive.items()),
            ),
            (
                "runs without qk-layernorm that end worse than a zero-layer bigram model",
                "all where logits are held at 10^4",
                f"{above} with a logit above 10^4, {below} of the others",
            ),
        ),
        columns=(
            "learning rate",
            "",
            "largest logit",
            "entropy, nats",
            "held-out loss, nats",
            "worse than a bigram model",
            "than frequencies",
        ),
        rows=tuple(
            (
                f"{rate:g}",
                way,
                spread(logits[way][at]),
                spread(entropy[way][at], ".2f"),
                spread(ends[way][at], ".2f"),
                f"{worse[way][at].sum()} of {seeds}",
                f"{lost[way][at].sum()} of {seeds}",
            )
            for at, rate in enumerate(RATES)
            for way in _WAYS
        ),
        claims=(
            Claim(
                "without qk-layernorm the largest logit grows with the learning rate, at least tenfold in each seed "
                f"(from {spread(plain[0])} at {RATES[0]:g} to {spread(plain[-1])} at {RATES[-1]:g}).",
                bool((plain[-1] >= 10 * plain[0]).all()),
            ),
            Claim(
                f"each run with a logit above 10^4 ends worse than a zero-layer bigram model ({above}; of the runs "
                f"without so large a logit {below}).",
                _where(worse[_PLAIN][beyond], worse[_PLAIN][~beyond]),
            ),
            Claim(
                "the loss deteriorates around 10^3: without qk-layernorm each run with a larger logit ends worse than "
                f"each without ({_range(far)} against {_range(near)} nats). But their largest logits are "
                f"{_range(plain[large], '.3g')} against {_range(plain[~large], '.3g')}, with nothing between; and at "
                f"the rates of the former runs with qk-layernorm end at {_range(ends[_NORMALIZED][rates])} nats, with "
                f"logits of {_range(normal[rates], '.3g')}.",
                None if not_apart else deteriorates,
            ),
            Claim(
                f"the loss diverges without qk-layernorm at {RATES[-1]:g}: by our harder yardstick, it is that of "
                f"frequencies, or worse, in each seed ({lost[_PLAIN][-1].sum()} of {seeds}).",
                bool(lost[_PLAIN][-1].all()),
            ),
            Claim(
                f"with it the largest logit at {RATES[-1]:g} is less than a tenth, in each seed "
                f"({spread(normal[-1])}).",
                bool((normal[-1] < plain[-1] / 10).all()),
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
                f"without it attention collapses: at {RATES[-1]:g} its entropy is less than half (our bound) of that "
                f"at {RATES[0]:g}, in each seed ({spread(entropy[_PLAIN][-1], '.2f')} and "
                f"{spread(entropy[_PLAIN][0], '.2f')} nats).",
                bool((entropy[_PLAIN][-1] < entropy[_PLAIN][0] / 2).all()),
            ),
            Claim(
                "block 0 has the largest logits: without qk-layernorm, on average over the seeds, at each rate from "
                "0.01 on.",
                bool((by_block[_PLAIN].mean(axis=1)[RATES.index(1e-2) :].argmax(axis=1) == 0).all()),
            ),
        ),
        remarks=_remarks(plain, normal, ends, bigram, lost, worse),
        panels=(
            Panel(
                "held-out loss in the end",
                "highest learning rate",
                "nats per character",
                tuple(curve(way, RATES, values) for way, values in ends.items()),
                log_x=10,
                reference=(bigram, "zero-layer bigram model"),
            ),
            Panel(
                "largest logit of a run and both blocks",
                "highest learning rate",
                "magnitude",
                tuple(curve(way, RATES, values) for way, values in logits.items()),
                log_x=10,
                log_y=10,
                reference=(_PUBLISHED_LOGIT, "published for block 0 at step 2000:\nall above diverged"),
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
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()}
        | {"loss zero-layer bigram model": alone.tolist()},
    )


def _remarks(
    plain: np.ndarray,
    normal: np.ndarray,
    ends: dict[str, np.ndarray],
    bigram: float,
    lost: dict[str, np.ndarray],
    worse: dict[str, np.ndarray],
) -> str:
    """What is said beside the claims.

    Args:
        plain: The largest logits without qk-layernorm, [rates, seeds].
        normal: The same with it.
        ends: The held-out losses of each way, likewise.
        bigram: That of a model without blocks.
        lost: Whether one who knows frequencies is as good, likewise.
        worse: Whether the model without blocks is better, likewise.
    """
    first = RATES.index(1e-2)
    slopes = np.diff(np.log(plain[first:]).mean(axis=1)) / np.diff(np.log(RATES[first:]))
    beyond = [int((values > _LARGEST_HALF).sum()) for values in (plain, normal)]
    best = min(values.mean(axis=1).min() for values in ends.values())
    return (
        f"By the harder yardstick {sum(values.sum() for values in lost.values())} of "
        f"{sum(values.size for values in lost.values())} runs diverge here. "
        f"The rate grows with the logits, and a rate of {RATES[-1]:g} costs with qk-layernorm, too "
        f"({spread(ends[_NORMALIZED][-1], '.2f')} nats). So not all that is lost at a logit above 10^4 is lost to the "
        "logits, and from which logit on anything is lost to them cannot be told.\n\n"
        "The runs are short: at the best rate the loss ends at "
        f"{best:.2f} nats on average, and a model without attention has {bigram:.2f}. Attention hardly pays "
        "by then, and the model without it has seen more text. So the paper's yardstick tells little here: at the "
        f"lowest rate {worse[_PLAIN][0].sum()} of {plain.shape[1]} runs, which have learned too little, are worse "
        "than that, too.\n\n"
        f"From {RATES[first]:g} on the largest logit grows as no one power of the learning rate: the exponents from "
        f"each rate to the next are {', '.join(f'{slope:.1f}' for slope in slopes)}. The paper gives no power. It "
        "hypothesizes that the instability could result from the quadratic dependence of logits on parameter norms."
        f"\n\nIn float16 a logit beyond {_LARGEST_HALF:.0f} is infinite: {beyond[0]} of {plain.size} runs without "
        f"qk-layernorm have one, and {beyond[1]} of {normal.size} with it. Where logits are kept in float16, one of "
        "+infinity makes the softmax NaN, and the step is skipped at any loss scale; one of -infinity is an attention "
        "of 0. The probe gives magnitudes and does not say which. "
        "`scaler.observe.watch(kinds=['attention'])` shows the growth before."
    )


def _where(large: np.ndarray, small: np.ndarray) -> bool | None:
    """Whether it is so of each run with a large logit; None if there is no such run or it is so of half the others."""
    if not large.size or (large.all() and small.size and small.mean() >= 0.5):
        return None
    return bool(large.all())


def _range(values: np.ndarray, form: str = ".2f") -> str:
    return f"{values.min():{form}} to {values.max():{form}}" if values.size else "none"


EXPERIMENT = Experiment(
    NAME, "attention logits that grow at high learning rates, with and without qk-layernorm", 200, run, 5
)
