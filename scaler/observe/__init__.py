"""What the values of a tensor are, counted by exponent, and what a number format would make of them."""

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
from scaler.observe.exponents import exponents as exponents
from scaler.observe.rounding_error import Interval as Interval
from scaler.observe.source import Source as Source

__all__ = [  # noqa: RUF022 - sorted by code point, as everywhere.
    "BINS",
    "Cast",
    "HIGHEST",
    "INFINITY",
    "Interval",
    "LOWEST",
    "NAN",
    "Source",
    "ZERO",
    "best_scale",
    "bin_of",
    "cast",
    "exponents",
]
