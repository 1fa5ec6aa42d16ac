"""Training in FP8, MXFP8, MXFP6, MXFP4 and NVFP4 against float32, paired by seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import scaler
from benchmarks.effects import small_transformer
from benchmarks.effects.effect import Effect, Experiment, Panel, curve, described, percent, spread
from benchmarks.effects.narrow_claims import (
    CNN,
    FITTING,
    FP8_SHARE,
    HIGH,
    MXFP4_SHARE,
    MXFP6_SHARE,
    NVFP4_SHARE,
    RANDOM,
    SCALED,
    TEXT,
    UNSCALED,
    WEIGHTS,
    WEIGHTS_SHARE,
    Losses,
    base_of,
    claims_of,
    gap_of,
)
from benchmarks.effects.narrow_runs import NarrowRuns, Way, first_weights
from benchmarks.effects.unit_runs import UNSCALED as SCALE_OF_ONE
from loops import tasks

NAME = "narrow-parity"
_RATE = 1e-2
_BATCH, _IMAGES = 16, 32
"""Examples of a step: of the transformer and of the CNN."""
_HELD_OUT = 256
_PUBLISHED = {
    "FP8": ("bfloat16", FP8_SHARE),
    "MXFP6": ("float32", MXFP6_SHARE),
    WEIGHTS: ("float32", WEIGHTS_SHARE),
    "MXFP4": ("bfloat16", MXFP4_SHARE),
    RANDOM: ("FP8", NVFP4_SHARE),
}
"""What a published loss is measured from, and how far above it is, relatively."""
_OTHERWISE = {
    "FP8": ", above 16 bits",
    "MXFP4": ", trained otherwise: no verdict",
    RANDOM: ", trained otherwise",
}
"""What else is published with a number."""
_ABOVE = {
    "float32": ("bfloat16", "MXFP6", WEIGHTS, "NVFP4"),
    "bfloat16": ("FP8", "MXFP8", "MXFP4"),
    "FP8": (RANDOM,),
}
"""The formats in the picture, by what they are compared with."""
_BY_FACTOR = ("MXFP8", "MXFP6", "MXFP4", "NVFP4")
_OF_CNN = ("float32", "FP8", "MXFP6", "NVFP4")
_SHORT = {WEIGHTS: "MXFP4 weights", RANDOM: "NVFP4 random"}


@dataclasses.dataclass(frozen=True)
class _FourBitWeights(scaler.formats.Emulated):
    """Weights in MXFP4, all else in the format."""

    @property
    def tensors(self) -> Any:
        activations, weights, gradients = super().tensors
        return activations, dataclasses.replace(weights, format="mxfp4"), gradients


def run(seeds: int = 5, steps: int = 100) -> Effect:
    """Trains the small transformer in each format, in some of them with parts of the loss, and a CNN in some.

    Args:
        seeds: The number of networks for each format.
        steps: The steps of each run.
    """
    ways = _ways()
    text = dataclasses.replace(small_transformer.text(), blocks=1, test_examples=_HELD_OUT)
    losses: Losses = {}
    starts = [first_weights(text, seed) for seed in range(seeds)]
    for name, way in ways.items():
        runs = NarrowRuns(way, text, steps, _RATE, _BATCH)
        for factor, network in ({1.0: TEXT} | (SCALED if name in _BY_FACTOR else {})).items():
            losses[network, name] = np.array([runs.run(seed, each, factor) for seed, each in enumerate(starts)])
    digits = tasks.load("digits")
    starts = [first_weights(digits, seed) for seed in range(seeds)]
    for name in _OF_CNN:
        # XLA compiles this CNN for longer than it then saves.
        runs = NarrowRuns(dataclasses.replace(ways[name], compiled=False), digits, steps, _RATE, _IMAGES)
        losses[CNN, name] = np.array([runs.run(seed, each) for seed, each in enumerate(starts)])
    return effect_of(losses, seeds, steps)


def _ways() -> dict[str, Way]:
    of = scaler.formats.emulated
    return {
        "float32": Way(None),
        "bfloat16": Way(of("bfloat16")),
        "FP8": Way(of("float8_e4m3fn")),
        UNSCALED: Way(of("float8_e4m3fn", gradients="float8_e4m3fn", scaling=SCALE_OF_ONE)),
        "MXFP8": Way(of("mxfp8_e4m3")),
        "MXFP6": Way(of("mxfp6_e3m2")),
        WEIGHTS: Way(_FourBitWeights("mxfp6_e3m2", "mxfp6_e3m2", None)),
        "MXFP4": Way(of("mxfp4")),
        "NVFP4": Way(of("nvfp4")),
        RANDOM: Way(of("nvfp4", stochastic=["gradients"]), compiled=False),
    }


def effect_of(losses: Losses, seeds: int, steps: int) -> Effect:
    """The effect that these losses show.

    Args:
        losses: Held-out losses [seeds] in nats, by network and format.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    networks = (TEXT, *SCALED.values(), CNN)
    keys = sorted(losses, key=lambda key: networks.index(key[0]))
    cnn = _OF_CNN[1:]
    exact = losses[CNN, "float32"]
    shown = [gap_of(losses[CNN, name] - exact).least / exact.mean() for name in cnn]
    by_size = {HIGH: SCALED[HIGH], FITTING: SCALED[FITTING], 1.0: TEXT}
    return Effect(
        **described(
            NAME,
            fp8_share=100 * FP8_SHARE.value,
            width=small_transformer.WIDTH,
            batch=_BATCH,
            context=small_transformer.CONTEXT,
            images=_IMAGES,
            rate=_RATE,
            **{
                name.lower(): f"{100 * (losses[TEXT, name] / losses[TEXT, 'float32'] - 1).mean():.1f} %"
                for name in _BY_FACTOR
            },
            least=100 * min(shown),
            most=100 * max(shown),
        ),
        seeds=seeds,
        steps=steps,
        beside=tuple(
            (
                f"{name}: loss above {base}",
                f"{share}{_OTHERWISE.get(name, '')}",
                percent(_above(losses, name), "+.1f"),
            )
            for name, (base, share) in _PUBLISHED.items()
        ),
        columns=(
            "network",
            "format",
            "held-out loss",
            "above float32, nats",
            "relatively",
            "least to be shown, nats",
        ),
        rows=tuple(
            (
                key[0].removeprefix(f"{TEXT}, "),
                key[1],
                spread(losses[key], ".3f"),
                *(_differences(losses, key) if key[1] != "float32" else ("", "", "")),
            )
            for key in keys
        ),
        claims=claims_of(losses, _BATCH * small_transformer.CONTEXT),
        panels=(
            _beside_published(losses, seeds),
            Panel(
                "transformer, with parts of the loss",
                "share of the loss",
                "held-out loss above float32, nats",
                tuple(
                    curve(
                        name,
                        range(len(by_size)),
                        np.array([losses[network, name] - losses[TEXT, "float32"] for network in by_size.values()]),
                    )
                    for name in _BY_FACTOR
                ),
                reference=(0.0, "float32"),
                ticks=("2/3", "3/4", "1"),
            ),
            Panel(
                "CNN",
                "",
                "held-out loss above float32, nats",
                (
                    curve(
                        "here",
                        range(len(cnn)),
                        np.array([losses[CNN, name] - losses[CNN, "float32"] for name in cnn]),
                    ),
                ),
                reference=(0.0, "float32"),
                ticks=cnn,
            ),
        ),
        measured={f"loss {network}, {name}": losses[network, name].tolist() for network, name in keys},
    )


def _beside_published(losses: Losses, seeds: int) -> Panel:
    """Each format above what a published difference is measured from, in percent."""
    shown = [name for names in _ABOVE.values() for name in names]
    above = {name: losses[TEXT, name] / losses[TEXT, base] - 1 for base, names in _ABOVE.items() for name in names}
    alone = [name for name in _PUBLISHED if name not in ("MXFP4", RANDOM)]
    published = {
        "published": alone,
        "published, not the format alone": [name for name in _PUBLISHED if name not in alone],
    }
    ends = np.cumsum([len(names) for names in _ABOVE.values()]) - 0.5
    return Panel(
        "transformer",
        "",
        "loss above the baseline, %",
        (
            curve("here", range(len(shown)), 100 * np.array([above[name] for name in shown])),
            *(
                curve(
                    label,
                    [shown.index(name) for name in names],
                    np.array([np.full(seeds, 100 * _PUBLISHED[name][1].value) for name in names]),
                )
                for label, names in published.items()
            ),
        ),
        reference=(0.0, "baseline"),
        ticks=tuple(_SHORT.get(name, name) for name in shown),
        bounds=tuple((float(end), f"above {base}") for end, base in zip(ends, _ABOVE, strict=True)),
    )


def _above(losses: Losses, name: str) -> np.ndarray:
    """The loss of the transformer above that of the published baseline, relatively."""
    return losses[TEXT, name] / losses[TEXT, _PUBLISHED[name][0]] - 1


def _differences(losses: Losses, key: tuple[str, str]) -> tuple[str, str, str]:
    base = losses[base_of(key[0])]
    gap = gap_of(losses[key] - base)
    return spread(gap.values, "+.3f"), percent(gap.values / base, "+.1f"), f"{gap.least:.3f}"


EXPERIMENT = Experiment(NAME, "FP8, MXFP8, MXFP6, MXFP4 and NVFP4 against float32", 100, run, seeds=5)
