"""What the values of a tensor are, counted by exponent, and what a number format would make of them."""

from scaler.backend.layers import layers_by_path as layers_by_path
from scaler.backend.layers import layers_of as layers_of
from scaler.observe.attention import Attention as Attention
from scaler.observe.attention import attention_of as attention_of
from scaler.observe.best_scale import best_scale as best_scale
from scaler.observe.bins import BINS as BINS
from scaler.observe.bins import HIGHEST as HIGHEST
from scaler.observe.bins import INFINITY as INFINITY
from scaler.observe.bins import LOWEST as LOWEST
from scaler.observe.bins import NAN as NAN
from scaler.observe.bins import ZERO as ZERO
from scaler.observe.bins import bin_of as bin_of
from scaler.observe.casts import Cast as Cast
from scaler.observe.casts import cast as cast
from scaler.observe.due import if_due as if_due
from scaler.observe.exponents import exponents as exponents
from scaler.observe.probes import Collection as Collection
from scaler.observe.probes import probe as probe
from scaler.observe.rounding_error import Interval as Interval
from scaler.observe.rows import Measured as Measured
from scaler.observe.rows import measured as measured
from scaler.observe.rows import swallowed_share as swallowed_share
from scaler.observe.source import Source as Source
from scaler.observe.watch import GAUGES as GAUGES
from scaler.observe.watch import KINDS as KINDS
from scaler.observe.watch import Watch as Watch
from scaler.observe.watch import watch as watch

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
