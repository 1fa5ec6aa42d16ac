"""Training in FP8, MXFP8, MXFP6, MXFP4 and NVFP4 against float32, paired by seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import small_transformer
from benchmarks.effects.effect import Found, curve, curves
from benchmarks.effects.runs import UNSCALED as SCALE_OF_ONE
from benchmarks.effects.runs import Task, Traced, held_out
from loops import tasks
from loops.tasks.text import ALPHABET

TEXT, CNN = "transformer", "CNN"
FITTING, HIGH = 3 / 4, 2 / 3
"""Factors of the loss with which MX formats hold the largest gradients well, and with which MXFP4 makes them larger."""
SCALED = {FITTING: f"{TEXT}, 3/4 of the loss", HIGH: f"{TEXT}, 2/3 of the loss"}
UNSCALED, WEIGHTS, RANDOM = "E4M3 without a scale", "MXFP4 weights, MXFP6", "NVFP4, random gradients"
_RATE = 1e-2
_BATCH, _IMAGES = 16, 32
"""Examples of a step: of the transformer and of the CNN."""
_HELD_OUT = 256
_BY_FACTOR = ("MXFP8", "MXFP6", "MXFP4", "NVFP4")
_OF_CNN = ("float32", "FP8", "MXFP6", "NVFP4")

Losses = Mapping[tuple[str, str], np.ndarray]
"""Held-out losses [seeds] in nats, by network and format."""


class Share(NamedTuple):
    """A published loss above another, relatively.

    Attributes:
        value: That of the published numbers.
        low: The least that it may have been before these were rounded.
        high: The largest.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, loss: float, base: float, part: Callable[[float, float], float] | None = None) -> Share:
        """That of two published numbers, which are rounded to a hundredth.

        Args:
            loss: The higher one.
            base: The other.
            part: What they make; without it loss / base - 1.
        """
        part = part or (lambda one, other: one / other - 1)
        half = 0.005
        return cls(part(loss, base), part(loss - half, base + half), part(loss + half, base - half))

    def nats(self, loss: float) -> tuple[float, float]:
        """The least and the largest of a loss in nats."""
        return self.low * loss, self.high * loss

    def __str__(self) -> str:
        value, low, high = (f"{100 * each:.1f} %" for each in self)
        return value if low == high else f"{value} ({low} to {high} before rounding)"


FP8_SHARE = Share.of(19.24, 19.14, lambda one, other: math.log(one / other) / math.log(other))
"""GPT of 126M parameters: the perplexity in FP8 and in 16 bits, as losses."""
MXFP6_SHARE, WEIGHTS_SHARE = Share.of(4.01, 3.98), Share.of(4.04, 3.98)
"""GPT of 20M parameters: the loss over that in float32."""
WEIGHTS_MORE = Share.of(4.04, 4.01, lambda one, other: (one - other) / 3.98)
"""The same with weights in MXFP4 over that in MXFP6, as a part of the loss in float32."""
NVFP4_SHARE, MXFP4_SHARE, MXFP4_MORE = (Share(each, each, each) for each in (0.015, 0.025, 0.010))
"""NVFP4 above FP8 and bfloat16, MXFP4 above bfloat16 and above NVFP4."""
_AS = 0.01
"""How much higher a loss of the transformer may be that is the same, where nothing is published. It is ours."""
_PUBLISHED = {"FP8": FP8_SHARE, "MXFP6": MXFP6_SHARE, WEIGHTS: WEIGHTS_SHARE, "MXFP4": MXFP4_SHARE, RANDOM: NVFP4_SHARE}
"""How far a published loss is above that of `_BASE`, relatively."""
_ALONE = ("FP8", "MXFP6", WEIGHTS)
"""Those of which nothing but the format is in the difference."""
_BASE = {
    **dict.fromkeys(("bfloat16", "MXFP6", WEIGHTS, "NVFP4"), "float32"),
    **dict.fromkeys(("FP8", "MXFP8", "MXFP4"), "bfloat16"),
    RANDOM: "FP8",
}
"""The formats in the picture, and what they are compared with."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantiles of Student's t for 2 to 10 seeds; more seeds are taken for 10, which is careful."""
_ELEMENTS = {"MXFP8": ("float8_e4m3fn", 256), "MXFP6": ("float6_e3m2fn", 16), "MXFP4": ("float4_e2m1fn", 4)}
"""The elements of MX formats, and the largest power of two of each."""


@dataclasses.dataclass(frozen=True)
class _FourBitWeights(scaler.formats.Emulated):
    """Weights in MXFP4, all else in the format."""

    @property
    def tensors(self) -> Any:
        activations, weights, gradients = super().tensors
        return activations, dataclasses.replace(weights, format="mxfp4"), gradients


def run(seeds: int, steps: int) -> Found:
    """Trains the small transformer in each format, in some of them with parts of the loss, and a CNN in some.

    Args:
        seeds: The number of networks for each format.
        steps: The steps of each run.
    """
    of = scaler.formats.emulated
    ways = {
        "float32": None,
        "bfloat16": of("bfloat16"),
        "FP8": of("float8_e4m3fn"),
        UNSCALED: of("float8_e4m3fn", gradients="float8_e4m3fn", scaling=SCALE_OF_ONE),
        "MXFP8": of("mxfp8_e4m3"),
        "MXFP6": of("mxfp6_e3m2"),
        WEIGHTS: _FourBitWeights("mxfp6_e3m2", "mxfp6_e3m2", None),
        "MXFP4": of("mxfp4"),
        "NVFP4": of("nvfp4"),
        RANDOM: of("nvfp4", stochastic=["gradients"]),
    }
    text = dataclasses.replace(small_transformer.text(), blocks=1, test_examples=_HELD_OUT)
    losses = {}
    starts = [first_weights(text, seed) for seed in range(seeds)]
    for name, rounding in ways.items():
        # XLA makes all steps several times as fast, but not random numbers.
        runs = NarrowRuns(rounding, text, steps, _BATCH, compiled=name != RANDOM)
        for factor, network in ({1.0: TEXT} | (SCALED if name in _BY_FACTOR else {})).items():
            losses[network, name] = np.array([runs.run(seed, each, factor) for seed, each in enumerate(starts)])
    digits = tasks.load("digits")
    starts = [first_weights(digits, seed) for seed in range(seeds)]
    for name in _OF_CNN:
        # XLA compiles this CNN for longer than it then saves.
        runs = NarrowRuns(ways[name], digits, steps, _IMAGES, compiled=False)
        losses[CNN, name] = np.array([runs.run(seed, each) for seed, each in enumerate(starts)])
    return found_of(losses)


def found_of(losses: Losses) -> Found:
    """What these losses show.

    Args:
        losses: Held-out losses [seeds] in nats, by network and format.
    """
    networks = (TEXT, *SCALED.values(), CNN)
    losses = {key: losses[key] for key in sorted(losses, key=lambda key: networks.index(key[0]))}
    characters = _BATCH * small_transformer.CONTEXT
    exact = {network: losses[CNN if network == CNN else TEXT, "float32"] for network in networks}
    gaps = {key: gap_of(each - exact[key[0]]) for key, each in losses.items()}
    shown = [gaps[CNN, name].least / exact[CNN].mean() for name in _OF_CNN[1:]]
    above = {name: losses[TEXT, name] / losses[TEXT, base] - 1 for name, base in _BASE.items()}
    places = list(_BASE)
    published = {
        "published": _ALONE,
        "published, not the format alone": [name for name in _PUBLISHED if name not in _ALONE],
    }
    found = judged(losses, characters)
    return Found(
        words={
            "above": {name: (losses[TEXT, name] / exact[TEXT] - 1).mean() for name in _BY_FACTOR},
            "least": 100 * min(shown),
            "most": 100 * max(shown),
            "paired": above,
            "said": {key: said for key, (_, said) in found.items()},
            "kept": {
                f"{name} {part}": kept(name, factor, characters)
                for name in _ELEMENTS
                for part, factor in (("1", 1), ("3/4", FITTING), ("2/3", HIGH))
            },
        },
        rows=(
            (
                network.removeprefix(f"{TEXT}, "),
                name,
                each,
                *((gap.values, gap.values / exact[network], gap.least) if name != "float32" else ("", "", "")),
            )
            for ((network, name), each), gap in zip(losses.items(), gaps.values(), strict=True)
        ),
        holds={key: holds for key, (holds, _) in found.items()},
        lines=[
            (
                curve("here", range(len(places)), 100 * np.array(list(above.values()))),
                *(
                    curve(
                        label,
                        [places.index(name) for name in names],
                        [np.full(len(exact[TEXT]), 100 * _PUBLISHED[name].value) for name in names],
                    )
                    for label, names in published.items()
                ),
            ),
            curves(
                range(3),
                {
                    name: [gaps[network, name].values for network in (SCALED[HIGH], SCALED[FITTING], TEXT)]
                    for name in _BY_FACTOR
                },
            ),
            curves(range(3), {"here": [gaps[CNN, name].values for name in _OF_CNN[1:]]}),
        ],
        measured={f"loss {network}, {name}": each.tolist() for (network, name), each in losses.items()},
    )


class Gap(NamedTuple):
    """How much higher one loss is than another.

    Attributes:
        values: [seeds], in nats.
        least: The least mean that the seeds could have shown, in nats: half of a 95 % interval. Infinite for one seed.
    """

    values: np.ndarray
    least: float

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return float(self.values.mean())

    @property
    def low(self) -> float:
        """The lower end of the interval of the mean."""
        return self.mean - self.least

    @property
    def high(self) -> float:
        """The upper end of the interval of the mean."""
        return self.mean + self.least


def gap_of(values: np.ndarray) -> Gap:
    """A difference by its values for each seed."""
    count = len(values)
    if count == 1:
        return Gap(values, math.inf)
    quantile = _STUDENT[min(count, len(_STUDENT) + 1) - 2]
    return Gap(values, float(quantile * values.std(ddof=1) / math.sqrt(count)))


def kept(name: str, factor: float, characters: int) -> float:
    """What an MX block makes of the gradient of the right character's logit at the first step, over that gradient.

    The network expects each character alike, so the gradient is nearly the factor over the number of characters. The
    scale of the block puts the largest power of two that is not above it at that of the element.

    Args:
        name: "MXFP8", "MXFP6" or "MXFP4".
        factor: Of the loss.
        characters: Of a batch, over which the loss is a mean.
    """
    element, octave = _ELEMENTS[name]
    share = factor * (1 - 1 / len(ALPHABET)) / characters
    held = share * 2.0 ** -math.floor(math.log2(share)) * octave
    return float(scaler.formats.rounded(tf.constant(held), element, saturate=True)) / held


def judged(losses: Losses, characters: int) -> dict[str, tuple[bool | None, str]]:
    """Whether each claim holds, and of what size it is.

    Args:
        losses: Of all networks and formats.
        characters: Of a batch of the transformer.
    """
    loss = float(losses[TEXT, "float32"].mean())
    same = Share(_AS, _AS, _AS).nats(loss)
    fitting, high = SCALED[FITTING], SCALED[HIGH]

    def above(name: str, other: str = "float32", network: str = TEXT) -> Gap:
        return gap_of(losses[network, name] - losses[TEXT, other])

    def between(name: str, one: str, other: str) -> Gap:
        return gap_of(losses[one, name] - losses[other, name])

    def beyond_nvfp4(network: str) -> Gap:
        return gap_of(losses[network, "MXFP4"] - losses[network, "NVFP4"])

    return {
        "bfloat16": _matches(above("bfloat16"), same),
        "FP8": _matches(above("FP8", "bfloat16"), FP8_SHARE.nats(loss)),
        "MXFP8": _loses(above("MXFP8", "bfloat16")),
        "MXFP8-diverges": _diverges(losses[TEXT, "MXFP8"]),
        "MXFP8-fitting": _matches(above("MXFP8", "bfloat16", fitting), same),
        "MXFP6": _matches(above("MXFP6"), MXFP6_SHARE.nats(loss)),
        "MXFP6-fitting": _matches(above("MXFP6", network=fitting), MXFP6_SHARE.nats(loss)),
        "weights": _matches(above(WEIGHTS), WEIGHTS_SHARE.nats(loss)),
        "weights-more": _loses(above(WEIGHTS, "MXFP6"), WEIGHTS_MORE.nats(loss)),
        "random": _matches(above(RANDOM, "FP8"), NVFP4_SHARE.nats(loss)),
        "nearest": _loses(above("NVFP4", RANDOM)),
        "NVFP4-diverges": _diverges(losses[TEXT, "NVFP4"]),
        "MXFP4": _loses(beyond_nvfp4(TEXT), MXFP4_MORE.nats(loss)),
        "MXFP4-fitting": _loses(beyond_nvfp4(fitting)),
        "MXFP4-high": _loses(beyond_nvfp4(high)),
        "unscaled": _loses(above(UNSCALED, "FP8")),
        "MXFP8-whole": _loses(between("MXFP8", TEXT, fitting)),
        "MXFP6-whole": _loses(between("MXFP6", TEXT, fitting)),
        "MXFP4-part": _loses(between("MXFP4", fitting, TEXT)),
        "MXFP4-less": _loses(between("MXFP4", high, fitting)),
        "NVFP4-whole": _matches(between("NVFP4", TEXT, fitting), same),
        "NVFP4-high": _matches(between("NVFP4", high, fitting), same),
    }


def _said(gap: Gap) -> str:
    """A difference and the interval of its mean."""
    return f"{gap.mean:+.3f}, {gap.low:+.3f} to {gap.high:+.3f}"


def _between(nats: tuple[float, float]) -> str:
    low, high = (f"{each:.3f}" for each in nats)
    return low if low == high else f"{low} to {high}"


def _matches(gap: Gap, room: tuple[float, float]) -> tuple[bool | None, str]:
    """That a difference is at most so many nats: the whole interval tells, or nothing does.

    Args:
        gap: The difference.
        room: What is allowed, in nats: the least and the largest that this may be.
    """
    holds = True if gap.high <= room[0] else False if gap.low > room[1] else None
    return holds, f"{_said(gap)}; allowed {_between(room)}"


def _diverges(losses: np.ndarray) -> tuple[bool | None, str]:
    """That a loss ends above that of guessing, where each character is expected alike.

    No paper says that so small a model diverges: if it does not, that tells nothing.
    """
    start = math.log(len(ALPHABET))
    above = losses > start
    said = f"above the {start:.2f} of guessing, our bound, in {above.sum()} of {len(losses)} seeds"
    return True if above.all() else None, said


def _loses(gap: Gap, size: tuple[float, float] | None = None) -> tuple[bool | None, str]:
    """That a loss is higher: by more than chance.

    Args:
        gap: The difference.
        size: The published difference in nats, the least and the largest that it may be. If these seeds could not have
            shown it, they cannot tell.
    """
    missed = size is not None and gap.least <= size[0] and gap.high < size[0]
    holds = True if gap.low > 0 else False if gap.high < 0 or missed else None
    return holds, _said(gap) + ("" if size is None else f"; published {_between(size)}")


class NarrowRuns(Traced):
    """A `TrainStep` of a task's network in one format; a run is one call of its graph.

    Args:
        rounding: What `scaler.formats.emulated` returns, or None for float32.
        task: The network and its data.
        steps: The steps of each run.
        batch: The examples of a step.
        compiled: Whether XLA compiles all steps.
    """

    def __init__(self, rounding: scaler.formats.Emulated | None, task: Task, steps: int, batch: int, *, compiled: bool):
        self._task, self._steps, self._batch = task, steps, batch
        model = task.model("float32")
        if rounding is not None:
            rounding(model)
        # A variable, so that one graph is for all factors.
        self._factor = tf.Variable(1.0, trainable=False)
        super().__init__(
            model,
            lambda labels, outputs: self._factor * task.loss(labels, outputs),
            keras.optimizers.Adam(_RATE),
            scaler.NoScaling(),
        )
        self._take = tf.function(self._taken, autograph=True, jit_compile=compiled)
        self._test = tf.function(lambda inputs, labels: task.loss(labels, model(inputs)))

    def run(self, seed: int, weights: Sequence[np.ndarray], factor: float = 1.0) -> float:
        """Trains from these weights and returns the held-out loss in the end, in nats.

        Args:
            seed: Determines the batches, which are the same for every format.
            weights: What the trainable variables begin with.
            factor: Of the loss in training. Adam's steps are the same for any, but for rounding and its epsilon.
        """
        # A shuffle depends on TensorFlow's seed besides its own.
        keras.utils.set_random_seed(seed)
        stacked = next(iter(self._task.dataset(self._batch, seed).batch(self._steps, drop_remainder=True)))
        self.begin(self._take, stacked)
        for variable, value in zip(self.model.trainable_variables, weights, strict=True):
            variable.assign(value)
        self._factor.assign(factor)
        self._take(stacked)
        return float(self._test(*held_out(self._task)))

    def _taken(self, stacked: Any) -> None:
        """All steps, on batches [steps, batch, ...]."""
        for number in tf.range(self._steps):
            self.step(tf.nest.map_structure(lambda part, number=number: part[number], stacked))


def first_weights(task: Task, seed: int) -> list[np.ndarray]:
    """What the trainable variables of a task's network begin with."""
    keras.utils.set_random_seed(seed)
    return [tf.convert_to_tensor(variable).numpy() for variable in task.model("float32").trainable_variables]
