"""Attention logits that grow at high learning rates, with and without normalized queries and keys."""

from __future__ import annotations

import dataclasses

import numpy as np

import scaler
from benchmarks.effects import output_logits
from benchmarks.effects import small_transformer as small
from benchmarks.effects.adam_copies import CLIPPED, Setup
from benchmarks.effects.effect import Found, curves, flat
from benchmarks.effects.small_transformer import RATES, Course, field

_PLAIN, _NORMALIZED = _WAYS = ("without", "with qk-layernorm")
_PUBLISHED_LOGIT, _DETERIORATES = 1e4, 1e3
_BIGRAM = Setup(1e-2, 0.95, way=CLIPPED, decay=1e-2)
"""How the model without blocks is trained: as the others, at a decay of 1e-4 a step; so is its z-loss."""
_LONGER = 100
"""How many times as many steps it takes, each of which sees a sixteenth as many characters."""
_LARGEST_HALF = scaler.float_format("float16").max
_HIGH = 0.1


def run(seeds: int, steps: int) -> Found:
    """Trains the small transformer at five learning rates, with and without qk-layernorm.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    courses = {}
    for way in _WAYS:
        made = small.SmallTransformer(way == _NORMALIZED, steps)
        courses[way] = [[made.run(rate, seed) for seed in range(seeds)] for rate in RATES]
    task = small.text()
    given, following = (each.numpy() for each in small.held_out(task))
    guess = small.frequency_loss(dataclasses.replace(task, test_characters=following.ravel()))
    alone = output_logits.train(
        [_BIGRAM], [1e-4], seeds=seeds, steps=_LONGER * steps, held_out=output_logits.pairs_of(given, following)
    )
    return found_of(courses, guess, alone.end[0], steps)


def found_of(courses: dict[str, list[list[Course]]], guess: float, alone: np.ndarray, steps: int) -> Found:
    """What its runs show.

    Args:
        courses: For each way the runs [rates][seeds].
        guess: The held-out loss of one who knows how frequent each character is.
        alone: The held-out losses of models without blocks, [seeds].
        steps: The steps of each run.
    """
    ends = {way: field(rows, "end") for way, rows in courses.items()}
    by_block = {way: field(rows, "logit").max(axis=2) for way, rows in courses.items()}
    logits = {way: values.max(axis=2) for way, values in by_block.items()}
    late = slice(-max(1, steps // 10), None)
    entropy = {way: field(rows, "entropy")[:, :, late].mean(axis=(2, 3)) for way, rows in courses.items()}
    sensitive = {way: small.sensitivity(ends[way], field(rows, "first")[0]) for way, rows in courses.items()}
    bigram = float(alone.mean())
    worse = {way: ~(values <= bigram) for way, values in ends.items()}
    lost = {way: ~(values < guess) for way, values in ends.items()}
    plain, normal = (logits[way] for way in _WAYS)
    beyond, large = plain > _PUBLISHED_LOGIT, plain > _DETERIORATES
    far, near = ends[_PLAIN][large], ends[_PLAIN][~large]
    normal_ends = ends[_NORMALIZED][large.any(axis=1)]
    high, first = RATES.index(_HIGH), RATES.index(1e-2)
    deteriorates = bool(large.any() and not large.all() and near.max() < far.min())
    # Neither where the loss begins to deteriorate nor that it is the logits' fault follows from such runs.
    not_apart = deteriorates and bool((normal_ends.mean(axis=1) > near.max()).all())
    return Found(
        words={
            "longer_steps": _LONGER * steps,
            "epochs": _LONGER * output_logits.BATCH / (small.BATCH * small.CONTEXT),
            "alone": alone,
            "bigram": bigram,
            "guess": guess,
            "mean_plain": plain[-1].mean(),
            "mean_normal": normal[-1].mean(),
            "diverged": sum(values.sum() for values in lost.values()),
            "runs": sum(values.size for values in lost.values()),
            "best": min(values.mean(axis=1).min() for values in ends.values()),
            "infinite": [_count(values > _LARGEST_HALF) for values in (plain, normal)],
            "sensitive": sensitive,
            "above": _count(worse[_PLAIN][beyond]),
            "below": _count(worse[_PLAIN][~beyond]),
            "large_logits": _range(plain[large], ".3g"),
            "other_logits": _range(plain[~large], ".3g"),
            "normal_ends": _range(normal_ends, ".2f"),
        },
        rows=(
            (
                f"{rate:g}",
                way,
                *(values[way][at] for values in (logits, entropy, ends)),
                *(_count(values[way][at]) for values in (worse, lost)),
            )
            for at, rate in enumerate(RATES)
            for way in _WAYS
        ),
        holds={
            "grows": plain[-1] >= 10 * plain[0],
            "worse": _where(worse[_PLAIN][beyond], worse[_PLAIN][~beyond]),
            "deteriorates": None if not_apart else deteriorates,
            "diverges": lost[_PLAIN][-1],
            "tenth": normal[-1] < plain[-1] / 10,
            "lower": ends[_NORMALIZED][high:] < ends[_PLAIN][high:],
            "sensitive": sensitive[_NORMALIZED] < sensitive[_PLAIN],
            "collapses": entropy[_PLAIN][-1] < entropy[_PLAIN][0] / 2,
            "first": by_block[_PLAIN].mean(axis=1)[first:].argmax(axis=1) == 0,
        },
        lines=[curves(RATES, values) for values in (ends, logits, entropy)],
        measured=flat({"logit": logits, "loss": ends, "entropy": entropy}, [f"{rate:g}" for rate in RATES])
        | flat({"sensitivity": sensitive, "loss zero-layer bigram model": alone}),
    )


def _count(so: np.ndarray) -> str:
    """Of how many it is so."""
    return f"{so.sum()} of {so.size}"


def _where(large: np.ndarray, small: np.ndarray) -> bool | None:
    """Whether it is so of each run with a large logit; None if there is no such run or it is so of half the others."""
    if not large.size or (large.all() and small.size and small.mean() >= 0.5):
        return None
    return bool(large.all())


def _range(values: np.ndarray, form: str) -> str:
    return f"{values.min():{form}} to {values.max():{form}}" if values.size else "none"
