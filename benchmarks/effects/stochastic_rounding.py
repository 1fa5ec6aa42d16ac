"""Training in short formats, rounded to nearest or at random: fixed point of few bits, and short floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, curves
from benchmarks.effects.networks import Ends

_INTEGER = 6
"""Bits before the point, with the sign: values lie within [-32, 32)."""
WORDS = (10, 12, 14, 16, 18, 20, 22)
_PUBLISHED_WORD = 16
FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_WAYS = ("to nearest", "at random")
_RATE = 0.1
_NEAR = 0.01
"""What counts as no loss: one point of accuracy. A yardstick of this page's own."""
_FEW = 0.1
"""The part of the loss of rounding to nearest that an 8-bit float may keep at random: likewise."""

Format = int | str
"""The bits of a fixed-point word, or the name of a float format."""


def run(seeds: int, steps: int) -> Found:
    """Trains in fixed point of several widths and in short floats, rounded in both ways, and in float32.

    Args:
        seeds: The number of networks of each kind.
        steps: The steps of each run.
    """
    exact = _train(None, "", seeds, steps)
    found = {(form, way): _train(form, way, seeds, steps) for form in (*WORDS, *FLOATS) for way in _WAYS}
    nearest, random = ({form: found[form, way] for form in (*WORDS, *FLOATS)} for way in _WAYS)
    left = {case: seen.accuracy / exact.accuracy for case, seen in found.items()}
    lost = _lost(exact, nearest)
    shown = {("float32", ""): exact, **{(_name(form), way): seen for (form, way), seen in found.items()}}
    return Found(
        words={
            "furthest": max(nearest[word].loss.max() for word in WORDS),
            "few": _said(fewest_bits(_lost(exact, random))),
            "many": _said(fewest_bits(lost)),
            "stayed": exact.stayed,
            "random_lost": 1 - left[_PUBLISHED_WORD, "at random"],
            "nearest_lost": 1 - left[_PUBLISHED_WORD, "to nearest"],
            "points": 100 * lost[_PUBLISHED_WORD],
            "failing": ", ".join(f"{each} bits" for each in _failing(exact, nearest, random)) or "none here",
        },
        rows=((*case, seen.accuracy, seen.loss, seen.stayed) for case, seen in shown.items()),
        holds=holds_of(exact, nearest, random),
        lines=[
            curves(WORDS, {way: [left[word, way] for word in WORDS] for way in _WAYS}),
            curves(WORDS, {way: [found[word, way].stayed for word in WORDS] for way in _WAYS}),
            curves(range(len(FLOATS)), {way: [left[form, way] for form in FLOATS] for way in _WAYS}),
        ],
        measured={
            f"{kind} {' '.join(case).strip()}": getattr(seen, kind).tolist()
            for case, seen in shown.items()
            for kind in Ends._fields
        },
    )


def holds_of(exact: Ends, nearest: Mapping[Format, Ends], random: Mapping[Format, Ends]) -> dict[str, Any]:
    """Whether each claim holds, of the runs by format."""
    to_nearest, at_random = _lost(exact, nearest), _lost(exact, random)
    few, many = (fewest_bits(lost) or np.inf for lost in (at_random, to_nearest))
    return {
        "random": at_random[_PUBLISHED_WORD] <= _NEAR,
        "nearest": to_nearest[_PUBLISHED_WORD] > _NEAR,
        "fails": bool(_failing(exact, nearest, random)),
        "fewer": few < many,
        "floats": [to_nearest[form] - at_random[form] >= -_NEAR for form in FLOATS],
        "tiny": [at_random[form] < _FEW * to_nearest[form] for form in FLOATS if form.startswith("float8")],
    }


def _lost(exact: Ends, by_format: Mapping[Format, Ends]) -> dict[Format, float]:
    """The mean accuracy that is lost in each format."""
    return {form: float(exact.accuracy.mean() - seen.accuracy.mean()) for form, seen in by_format.items()}


def _failing(exact: Ends, nearest: Mapping[Format, Ends], random: Mapping[Format, Ends]) -> list[int]:
    """The words that lose half of the accuracy to nearest in each seed, and nothing at random."""
    lost = _lost(exact, random)
    return [word for word in WORDS if (nearest[word].accuracy < exact.accuracy / 2).all() and lost[word] <= _NEAR]


def fewest_bits(lost: Mapping[Format, float]) -> int | None:
    """The shortest word from which on every longer one loses at most one point; None if the longest loses more."""
    words = sorted(word for word in lost if isinstance(word, int))
    found = None
    for word in reversed(words):
        if lost[word] > _NEAR:
            break
        found = word
    return found


def fixed_point(values: tf.Tensor, fraction: int, seed: tf.Tensor | Sequence[int] | None = None) -> tf.Tensor:
    """Float32 values as multiples of 2^-fraction within [-32, 32); what is larger saturates.

    To nearest with ties to even, or with a seed at random: up with the probability of the distance from below
    (Gupta et al. 2015, https://arxiv.org/abs/1502.02551).

    Args:
        values: Float32, of any shape.
        fraction: Bits behind the point, so few that float32 holds all words: at most 18.
        seed: Int32 [2], or None to round to nearest.
    """
    places = values * 2.0**fraction
    below = tf.floor(places)
    if seed is None:
        whole = tf.round(places)
    else:
        # Compared with the rest, which is exact: a number added to a large value would lose its bits.
        whole = below + tf.cast(tf.random.stateless_uniform(tf.shape(values), seed) < places - below, tf.float32)
    limit = 2.0 ** (fraction + _INTEGER - 1)
    return tf.clip_by_value(whole, -limit, limit - 1) * 2.0**-fraction


def rounded(values: tf.Tensor, form: Format, seed: tf.Tensor | None = None) -> tf.Tensor:
    """Float32 values as a format holds them: to nearest, or with int32 `seed` [2] at random."""
    if isinstance(form, int):
        return fixed_point(values, form - _INTEGER, seed)
    return scaler.formats.rounded(values, form, saturate=True, seed=seed)


class _Rounding:
    """Rounds the tensors of a step, each by other numbers."""

    def __init__(self, form: Format | None, way: str, step: tf.Tensor):
        self._form, self._random, self._step, self._tensors = form, way == "at random", step, 0

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        self._tensors += 1
        if self._form is None:
            return values
        return rounded(values, self._form, tf.stack([self._step, self._tensors]) if self._random else None)


def _train(form: Format | None, way: str, seeds: int, steps: int) -> Ends:
    """Trains all seeds at once; no format is float32."""
    problem = networks.digits()

    def start() -> list[tf.Tensor]:
        return [_Rounding(form, way, tf.constant(-1))(weight) for weight in networks.start(seeds)]

    def take(step: tf.Tensor, weights: list[tf.Tensor]) -> tuple:
        images, labels = networks.batch(problem, step, seeds)
        rounding = _Rounding(form, way, step)
        seen = networks.backward(weights, images, labels, tf.ones([seeds]), rounding, rounding)
        moved = [rounding(weight - _RATE * grad) for weight, grad in zip(weights, seen.grads, strict=True)]
        return moved, networks.share([new == old for new, old in zip(moved, weights, strict=True)])

    return networks.ends_of(problem, *networks.over_steps(steps, start, take))


def _name(form: Format) -> str:
    if isinstance(form, int):
        return f"fixed point, {form} bits"
    return {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}.get(form, form)


def _said(bits: int | None) -> str:
    return f"more than {max(WORDS)} bits" if bits is None else f"{bits} bits"
