"""Differences of losses paired by seed, and what is claimed of narrow formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects.effect import Claim
from loops.tasks.text import ALPHABET

TEXT, CNN = "transformer", "CNN"
FITTING, HIGH = 3 / 4, 2 / 3
"""Factors of the loss with which MX formats hold the largest gradients well, and with which MXFP4 makes them larger."""
SCALED = {FITTING: f"{TEXT}, 3/4 of the loss", HIGH: f"{TEXT}, 2/3 of the loss"}
UNSCALED, WEIGHTS, RANDOM = "E4M3 without a scale", "MXFP4 weights, MXFP6", "NVFP4, random gradients"


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
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantiles of Student's t for 2 to 10 seeds; more seeds are taken for 10, which is careful."""
_ELEMENTS = {"MXFP8": ("float8_e4m3fn", 256), "MXFP6": ("float6_e3m2fn", 16), "MXFP4": ("float4_e2m1fn", 4)}
"""The elements of MX formats, and the largest power of two of each."""

Losses = dict[tuple[str, str], np.ndarray]
"""Held-out losses [seeds] in nats, by network and format."""


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


def base_of(network: str) -> tuple[str, str]:
    """The runs in float32 that a network is compared with."""
    return (CNN if network == CNN else TEXT), "float32"


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


def claims_of(losses: Losses, characters: int) -> tuple[Claim, ...]:
    """What is claimed.

    Args:
        losses: Of all networks and formats.
        characters: Of a batch of the transformer.
    """
    loss = float(losses[TEXT, "float32"].mean())

    def above(name: str, other: str = "float32", network: str = TEXT) -> Gap:
        return gap_of(losses[network, name] - losses[TEXT, other])

    def by_factor(name: str, one: str, other: str) -> Gap:
        return gap_of(losses[one, name] - losses[other, name])

    def times(name: str, factor: float) -> str:
        return f"{kept(name, factor, characters):.2f}"

    same = (_AS * loss,) * 2

    return (
        _matches(f"bfloat16 ends at most {100 * _AS:g} % above float32", above("bfloat16"), same, published=False),
        _matches(
            f"FP8 ends at most the published {_percent(FP8_SHARE.value)} above bfloat16",
            above("FP8", "bfloat16"),
            FP8_SHARE.nats(loss),
        ),
        _loses("MXFP8 ends above bfloat16", above("MXFP8", "bfloat16"), published=False),
        _diverges("MXFP8 diverges, as is published of large models", losses[TEXT, "MXFP8"]),
        _matches(
            f"with 3/4 of the loss MXFP8 ends at most {100 * _AS:g} % above bfloat16",
            above("MXFP8", "bfloat16", SCALED[FITTING]),
            same,
            published=False,
        ),
        *(
            _matches(
                f"{where}MXFP6 ends at most the published {_percent(MXFP6_SHARE.value)} above float32",
                above("MXFP6", network=network),
                MXFP6_SHARE.nats(loss),
            )
            for network, where in ((TEXT, ""), (SCALED[FITTING], "with 3/4 of the loss "))
        ),
        _matches(
            f"with weights in MXFP4 MXFP6 ends at most the published {_percent(WEIGHTS_SHARE.value)} above float32",
            above(WEIGHTS),
            WEIGHTS_SHARE.nats(loss),
        ),
        _loses(
            f"weights in MXFP4 lose more, published {_percent(WEIGHTS_MORE.value)}, than MXFP6",
            above(WEIGHTS, "MXFP6"),
            WEIGHTS_MORE.nats(loss),
        ),
        _matches(
            f"NVFP4 with random gradients ends at most the published {_percent(NVFP4_SHARE.value)} above FP8",
            above(RANDOM, "FP8"),
            NVFP4_SHARE.nats(loss),
        ),
        _loses("NVFP4 loses more with gradients rounded to nearest", above("NVFP4", RANDOM)),
        _diverges(
            "NVFP4 to nearest in all layers diverges, as is published of large models",
            losses[TEXT, "NVFP4"],
        ),
        _loses(
            f"MXFP4 loses more, published {_percent(MXFP4_MORE.value)}, than NVFP4, both to nearest",
            gap_of(losses[TEXT, "MXFP4"] - losses[TEXT, "NVFP4"]),
            MXFP4_MORE.nats(loss),
        ),
        *(
            _loses(
                f"with {what} of the loss MXFP4 loses more than NVFP4",
                gap_of(losses[network, "MXFP4"] - losses[network, "NVFP4"]),
                published=False,
            )
            for what, network in (("3/4", SCALED[FITTING]), ("2/3", SCALED[HIGH]))
        ),
        _loses("E4M3 without a scale loses against FP8", above(UNSCALED, "FP8"), published=False),
        *(
            _loses(
                f"{name} loses more with the whole loss, where the right character's first gradient is multiplied "
                f"by {times(name, 1)}, than with 3/4, by {times(name, FITTING)}",
                by_factor(name, TEXT, SCALED[FITTING]),
                published=False,
            )
            for name in ("MXFP8", "MXFP6")
        ),
        _loses(
            f"MXFP4 loses more with 3/4 of the loss, by {times('MXFP4', FITTING)}, than with the whole, by "
            f"{times('MXFP4', 1)}",
            by_factor("MXFP4", SCALED[FITTING], TEXT),
            published=False,
        ),
        _loses(
            f"MXFP4 loses more with 2/3 of the loss, by {times('MXFP4', HIGH)}, than with 3/4",
            by_factor("MXFP4", SCALED[HIGH], SCALED[FITTING]),
            published=False,
        ),
        *(
            _matches(
                f"NVFP4 ends at most {100 * _AS:g} % higher {how}", by_factor("NVFP4", *pair), same, published=False
            )
            for how, pair in (
                ("with the whole loss than with 3/4", (TEXT, SCALED[FITTING])),
                ("with 2/3 than with 3/4", (SCALED[HIGH], SCALED[FITTING])),
            )
        ),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _said(gap: Gap) -> str:
    """A difference and the interval of its mean."""
    return f"{gap.mean:+.3f}, {gap.low:+.3f} to {gap.high:+.3f}"


def _matches(what: str, gap: Gap, room: tuple[float, float], published: bool = True) -> Claim:
    """That a difference is at most so many nats: the whole interval tells, or nothing does.

    Args:
        what: The claim.
        gap: The difference.
        room: What is allowed, in nats: the least and the largest that this may be.
        published: Whether somebody published it.
    """
    holds = True if gap.high <= room[0] else False if gap.low > room[1] else None
    return Claim(f"{what} ({_said(gap)}; allowed {_between(room)}).", holds, published)


def _between(nats: tuple[float, float]) -> str:
    low, high = (f"{each:.3f}" for each in nats)
    return low if low == high else f"{low} to {high}"


def _diverges(what: str, losses: np.ndarray) -> Claim:
    """That a loss ends above that of guessing, where each character is expected alike.

    No paper says that so small a model diverges: if it does not, that tells nothing.
    """
    start = math.log(len(ALPHABET))
    above = losses > start
    return Claim(
        f"{what} (above the {start:.2f} of guessing, our bound, in {above.sum()} of {len(losses)} seeds).",
        True if above.all() else None,
    )


def _loses(what: str, gap: Gap, size: tuple[float, float] | None = None, published: bool = True) -> Claim:
    """That a loss is higher: by more than chance.

    Args:
        what: The claim.
        gap: The difference.
        size: The published difference in nats, the least and the largest that it may be. If these seeds could not have
            shown it, they cannot tell.
        published: Whether somebody published it.
    """
    missed = size is not None and gap.least <= size[0] and gap.high < size[0]
    holds = True if gap.low > 0 else False if gap.high < 0 or missed else None
    needed = "" if size is None else f"; published {_between(size)}"
    return Claim(f"{what} ({_said(gap)}{needed}).", holds, published)
