"""The formats of single values that can be emulated."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from scaler.errors import InvalidArgument

_LARGEST_BFLOAT16 = (2.0 - 2.0**-7) * 2.0**127


@dataclasses.dataclass(frozen=True)
class Element:
    """What rounding to a format needs to know of it.

    Attributes:
        name: As `ml_dtypes` calls it.
        fraction_bits: How many bits of the significand are stored.
        least_exponent: That of the smallest normal number.
        largest: The largest finite value.
        beyond: What a finite value becomes that rounds to more than `largest`, if it does not saturate.
    """

    name: str
    fraction_bits: int
    least_exponent: int
    largest: float
    beyond: Literal["infinity", "nan", "largest"]

    @property
    def largest_bits(self) -> int:
        """The pattern of `largest` in float32."""
        return int(np.float32(self.largest).view(np.int32))

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest power of two: emax in the OCP specification."""
        exponent = self.least_exponent
        while 2.0 ** (exponent + 1) <= self.largest:
            exponent += 1
        return exponent


ELEMENTS = {
    element.name: element
    for element in (
        Element("float16", 10, -14, 65504.0, "infinity"),
        Element("bfloat16", 7, -126, _LARGEST_BFLOAT16, "infinity"),
        # Micikevicius et al. 2022, FP8 Formats for Deep Learning (https://arxiv.org/abs/2209.05433), table 1.
        Element("float8_e4m3fn", 3, -6, 448.0, "nan"),
        Element("float8_e5m2", 2, -14, 57344.0, "infinity"),
        # OCP Microscaling Formats (MX) Specification 1.0, section 5.3: neither infinity nor NaN.
        Element("float6_e2m3fn", 3, 0, 7.5, "largest"),
        Element("float6_e3m2fn", 2, -2, 28.0, "largest"),
        Element("float4_e2m1fn", 1, 0, 6.0, "largest"),
    )
}
"""Every format by its name."""


def element_of(name: object) -> Element:
    """The format of a name.

    Raises:
        InvalidArgument: For any other.
    """
    if not isinstance(name, str) or name not in ELEMENTS:
        raise InvalidArgument(f"format {name!r}: expected one of {', '.join(ELEMENTS)}.")
    return ELEMENTS[name]
