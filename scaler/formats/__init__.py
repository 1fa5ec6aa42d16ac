"""Training in a format that the machine does not have: rounding, scales, blocks, and the products of layers."""

from scaler.backend.formats import FloatFormat as FloatFormat
from scaler.backend.formats import float_format as float_format
from scaler.formats.emulated import FORMATS as FORMATS
from scaler.formats.emulated import Emulated as Emulated
from scaler.formats.emulated import emulated as emulated
from scaler.formats.rounding import rounded as rounded

__all__ = [  # noqa: RUF022 - sorted by code point, as everywhere.
    "Emulated",
    "FORMATS",
    "FloatFormat",
    "emulated",
    "float_format",
    "rounded",
]
