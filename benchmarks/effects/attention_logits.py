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
    first = RATES.index(1e-2)
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
            top=RATES[-1],
            plain=plain[-1].mean(),
            normal=normal[-1].mean(),
            diverged=sum(values.sum() for values in lost.values()),
            runs=sum(values.size for values in lost.values()),
            best=min(values.mean(axis=1).min() for values in ends.values()),
            bigram=bigram,
            infinite=f"{(plain > _LARGEST_HALF).sum()} of {plain.size}",
            infinite_normal=f"{(normal > _LARGEST_HALF).sum()} of {normal.size}",
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
                "without qk-layernorm the largest logit grows with the learning rate, at least tenfold in each seed.",
                bool((plain[-1] >= 10 * plain[0]).all()),
            ),
            Claim(
                f"each run with a logit above 10^4 ends worse than a bigram model ({above}; of the others {below}).",
                _where(worse[_PLAIN][beyond], worse[_PLAIN][~beyond]),
            ),
            Claim(
                "the loss deteriorates around 10^3: without qk-layernorm each run with a larger logit ends worse than "
                f"each without (logits of {_range(plain[large], '.3g')} against {_range(plain[~large], '.3g')}; with "
                f"qk-layernorm the former's rates end at {_range(ends[_NORMALIZED][rates])} nats).",
                None if not_apart else deteriorates,
            ),
            Claim(
                f"the loss diverges without qk-layernorm at {RATES[-1]:g}: it is that of frequencies or worse, in each "
                "seed.",
                bool(lost[_PLAIN][-1].all()),
            ),
            Claim(
                f"with it the largest logit at {RATES[-1]:g} is less than a tenth, in each seed.",
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
                f"at {RATES[0]:g}, in each seed.",
                bool((entropy[_PLAIN][-1] < entropy[_PLAIN][0] / 2).all()),
            ),
            Claim(
                "without it block 0 has the largest logits, on average over the seeds, at each rate from 0.01 on.",
                bool((by_block[_PLAIN].mean(axis=1)[first:].argmax(axis=1) == 0).all()),
            ),
        ),
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
