"""Training in a format that the machine does not have, and models that fit a narrow one without a loss scale."""

from scaler.backend.formats import FloatFormat as FloatFormat
from scaler.backend.formats import float_format as float_format
from scaler.formats.emulated import FORMATS as FORMATS
from scaler.formats.emulated import Emulated as Emulated
from scaler.formats.emulated import emulated as emulated
from scaler.formats.layers import changed as changed
from scaler.formats.tensors import rounded as rounded
from scaler.formats.unit_scaled import unit_cross_entropy as unit_cross_entropy
from scaler.formats.unit_scaled import unit_scaled as unit_scaled

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
