"""How one of a product's three tensors is rounded: its format, its scale, and by chance or to nearest."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from scaler.formats.blocks import BLOCK_FORMATS, in_blocks
from scaler.formats.elements import ELEMENTS
from scaler.formats.products import Axes
from scaler.formats.rounding import round_float32, seed_from
from scaler.formats.scales import amax_of, at_scale, current_scale

UNCHANGED = "float32"
SCALED = ("float8_e4m3fn", "float8_e5m2")
"""Formats that need a scale for each tensor."""
PLAIN = ("float16", "bfloat16")
"""Formats whose range is wide enough without one."""


@dataclasses.dataclass(frozen=True)
class TensorFormat:
    """What one of the tensors is rounded to.

    Attributes:
        format: As `emulated` takes it.
        stochastic: Whether at random.
        seed: For that.
        role: A number for each of the three tensors, so that they draw other numbers.
    """

    format: str
    stochastic: bool
    seed: int
    role: int

    @property
    def in_blocks(self) -> bool:
        """Whether the result depends on the axes."""
        return self.format in BLOCK_FORMATS

    @property
    def scaled(self) -> bool:
        """Whether there is a scale for the whole tensor, which may come from past steps."""
        return self.format in SCALED

    def __call__(self, values: tf.Tensor, axes: Axes, scale: tf.Tensor | None = None) -> tf.Tensor:
        """Rounds float32 values: at a scale, or at that of their own largest magnitude if none is given."""
        if self.format == UNCHANGED:
            return values
        seed = seed_from(values, self.seed, self.role) if self.stochastic else None
        if self.in_blocks:
            return in_blocks(values, BLOCK_FORMATS[self.format], axes, seed)
        element = ELEMENTS[self.format]
        if not self.scaled:
            return round_float32(values, element, False, seed)
        if scale is None:
            scale = current_scale(amax_of(values), element.largest)
        return at_scale(values, scale, element, seed)
