"""Training in short formats, rounded to nearest or at random: fixed point of few bits, and short floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, curve, described, percent, spread

NAME = "stochastic-rounding"
_INTEGER = 6
"""Bits before the point, with the sign: values lie within [-32, 32)."""
_WORDS = (10, 12, 14, 16, 18, 20, 22)
_PUBLISHED_WORD = 16
_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_WAYS = ("to nearest", "at random")
_RATE = 0.1
_NEAR = 0.01
"""What counts as no loss: one point of accuracy. A yardstick of this page's own."""
_FEW = 0.1
"""The part of the loss of rounding to nearest that an 8-bit float may keep at random: likewise."""


@dataclasses.dataclass(frozen=True)
class _Case:
    """How a network is rounded.

    Attributes:
        format: The bits of a fixed-point word, or the name of a float format.
        way: One of `_WAYS`.
    """

    format: int | str
    way: str

    def rounded(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Float32 values as the format holds them; int32 `seed` [2] draws the numbers if it is at random."""
        drawn = seed if self.way == "at random" else None
        if isinstance(self.format, int):
            return fixed_point(values, self.format - _INTEGER, drawn)
        return scaler.formats.rounded(values, self.format, saturate=True, seed=drawn)


class Trained(NamedTuple):
    """For each seed: held-out accuracy and loss, and the share of weights that a step leaves as they were."""

    accuracy: np.ndarray
    loss: np.ndarray
    stayed: np.ndarray


def run(seeds: int = 5, steps: int = 600) -> Effect:
    """Trains in fixed point of several widths and in short floats, rounded in both ways, and in float32.

    Args:
        seeds: The number of networks of each kind.
        steps: The steps of each run.
    """
    exact = _train(None, seeds, steps)
    found = {(form, way): _train(_Case(form, way), seeds, steps) for form in (*_WORDS, *_FLOATS) for way in _WAYS}
    nearest, random = ({form: found[form, way] for form in (*_WORDS, *_FLOATS)} for way in _WAYS)
    left = {case: seen.accuracy / exact.accuracy for case, seen in found.items()}
    here = [left[_PUBLISHED_WORD, way] for way in _WAYS]
    many, few = (
        fewest_bits({form: float((exact.accuracy - seen.accuracy).mean()) for form, seen in way.items()})
        for way in (nearest, random)
    )
    furthest = max(nearest[word].loss.max() for word in _WORDS)
    return Effect(
        **described(
            NAME,
            rate=_RATE,
            integer=_INTEGER,
            furthest=furthest,
            few=_said(few),
            many=_said(many),
            stayed=percent(exact.stayed, ".0f"),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"{_PUBLISHED_WORD}-bit fixed point at random: loss of accuracy, relatively",
                "little to none",
                percent(1 - here[1]),
            ),
            (
                f"{_PUBLISHED_WORD}-bit fixed point to nearest",
                "fails in some settings (Xia et al.)",
                f"{percent(1 - here[0])} lost",
            ),
        ),
        columns=("format", "rounding", "accuracy", "held-out loss", "stayed"),
        rows=(
            ("float32", "", percent(exact.accuracy), spread(exact.loss), percent(exact.stayed)),
            *(
                (_name(form), way, percent(seen.accuracy), spread(seen.loss), percent(seen.stayed))
                for (form, way), seen in found.items()
            ),
        ),
        claims=_claims(exact, nearest, random),
        panels=(
            Panel(
                "fixed point",
                "bits of a word",
                "accuracy, times that of float32",
                tuple(curve(way, _WORDS, np.array([left[word, way] for word in _WORDS])) for way in _WAYS),
                reference=(1.0, "float32"),
            ),
            Panel(
                "weights that stay in a step, fixed point",
                "bits of a word",
                "share of all weights",
                tuple(curve(way, _WORDS, np.array([found[word, way].stayed for word in _WORDS])) for way in _WAYS),
                reference=(float(exact.stayed.mean()), "float32"),
            ),
            Panel(
                "short floats",
                "",
                "accuracy, times that of float32",
                tuple(
                    curve(way, range(len(_FLOATS)), np.array([left[form, way] for form in _FLOATS])) for way in _WAYS
                ),
                reference=(1.0, "float32"),
                ticks=tuple(_name(form) for form in _FLOATS),
            ),
        ),
        measured={
            f"{kind} {name}": getattr(seen, kind).tolist()
            for name, seen in (
                ("float32", exact),
                *((f"{_name(form)} {way}", seen) for (form, way), seen in found.items()),
            )
            for kind in Trained._fields
        },
    )


def _claims(exact: Trained, nearest: dict[int | str, Trained], random: dict[int | str, Trained]) -> tuple[Claim, ...]:
    """What is claimed, of the runs by format."""
    base = exact.accuracy.mean()
    lost = [{form: float(base - seen.accuracy.mean()) for form, seen in way.items()} for way in (nearest, random)]
    word = _PUBLISHED_WORD
    fewest = [fewest_bits(way) or np.inf for way in lost]
    short = {form: lost[0][form] - lost[1][form] for form in _FLOATS}
    tiny = {form: (lost[0][form], lost[1][form]) for form in _FLOATS if form.startswith("float8")}
    failing = [
        each for each in _WORDS if (nearest[each].accuracy < exact.accuracy / 2).all() and lost[1][each] <= _NEAR
    ]
    return (
        Claim(f"{word}-bit fixed point at random trains within one point of float32.", lost[1][word] <= _NEAR),
        Claim(
            f"at {word} bits rounding to nearest loses more than one point (here {100 * lost[0][word]:.1f}).",
            lost[0][word] > _NEAR,
        ),
        Claim(
            "somewhere rounding to nearest leaves less than half of the accuracy in each seed, and rounding at random "
            "is within one point "
            f"({', '.join(f'{each} bits' for each in failing) or 'none here'}).",
            bool(failing),
        ),
        Claim("at random fewer bits come within one point of float32 than to nearest.", fewest[1] < fewest[0]),
        Claim(
            "in no short float is rounding at random worse by more than a point.",
            all(gain >= -_NEAR for gain in short.values()),
            published=False,
        ),
        Claim(
            f"at random an 8-bit float loses less than {_FEW:g} (our bound) of what it loses to nearest.",
            all(random < _FEW * near for near, random in tiny.values()),
            published=False,
        ),
    )


def fewest_bits(lost: dict[int | str, float]) -> int | None:
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


class _Rounding:
    """Rounds the tensors of a step, each by other numbers."""

    def __init__(self, case: _Case | None, step: tf.Tensor):
        self._case, self._step, self._tensors = case, step, 0

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        self._tensors += 1
        if self._case is None:
            return values
        return self._case.rounded(values, tf.stack([self._step, self._tensors]))


def _train(case: _Case | None, seeds: int, steps: int) -> Trained:
    """Trains all seeds at once; None is float32."""
    problem = networks.digits()

    @tf.function(autograph=True)
    def run() -> tuple:
        weights = [_Rounding(case, tf.constant(-1))(weight) for weight in networks.start(seeds)]
        stayed = tf.zeros([seeds])
        for step in tf.range(steps):
            images, labels = networks.batch(problem, step, seeds)
            rounding = _Rounding(case, step)
            seen = networks.backward(weights, images, labels, tf.ones([seeds]), rounding, rounding)
            moved = [rounding(weight - _RATE * grad) for weight, grad in zip(weights, seen.grads, strict=True)]
            share = networks.share([new == old for new, old in zip(moved, weights, strict=True)])
            stayed += tf.where(step >= steps // 2, share, 0.0)
            weights = moved
        return weights, stayed / tf.cast(steps - steps // 2, tf.float32)

    weights, stayed = run.get_concrete_function()()
    loss, accuracy = networks.evaluate(weights, problem.test_images, problem.test_labels)
    return Trained(accuracy.numpy(), loss.numpy(), stayed.numpy())


def _name(form: int | str) -> str:
    if isinstance(form, int):
        return f"fixed point, {form} bits"
    return {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}.get(form, form)


def _said(bits: int | None) -> str:
    return f"more than {max(_WORDS)} bits" if bits is None else f"{bits} bits"


EXPERIMENT = Experiment(NAME, "fixed point and short floats, rounded to nearest or at random", 600, run, seeds=5)
