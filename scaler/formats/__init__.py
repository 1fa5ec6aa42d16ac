"""Training in a format that the machine does not have, and models that fit a narrow one without a loss scale."""

from scaler.backend.formats import FloatFormat, float_format
from scaler.formats.emulated import FORMATS, Emulated, emulated
from scaler.formats.layers import changed
from scaler.formats.tensors import rounded
from scaler.formats.unit_scaled import unit_cross_entropy, unit_scaled

__all__ = [  # noqa: RUF022 - sorted by code point, as everywhere.
    "Emulated",
    "FORMATS",
    "FloatFormat",
    "changed",
    "emulated",
    "float_format",
    "rounded",
    "unit_cross_entropy",
    "unit_scaled",
]
