"""What the values of a tensor are, counted by exponent, and what a number format would make of them."""

from scaler.backend.layers import layers_by_path, layers_of
from scaler.observe.casts import Cast, Interval, Source, best_scale, cast
from scaler.observe.exponents import (
    BINS,
    HIGHEST,
    INFINITY,
    LOWEST,
    NAN,
    ZERO,
    Measured,
    bin_of,
    exponents,
    if_due,
    measured,
    swallowed_share,
)
from scaler.observe.probes import Attention, Collection, attention_of, probe
from scaler.observe.watch import GAUGES, KINDS, Watch, watch

__all__ = [  # noqa: RUF022 - sorted by code point, as everywhere.
    "Attention",
    "BINS",
    "Cast",
    "Collection",
    "GAUGES",
    "HIGHEST",
    "INFINITY",
    "Interval",
    "KINDS",
    "LOWEST",
    "Measured",
    "NAN",
    "Source",
    "Watch",
    "ZERO",
    "attention_of",
    "best_scale",
    "bin_of",
    "cast",
    "exponents",
    "if_due",
    "layers_by_path",
    "layers_of",
    "measured",
    "probe",
    "swallowed_share",
    "watch",
]
